"""Pool of device memory that a publisher reuses for one part after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct

from trinity_schemas import ALIGNMENT

from .memory import DeviceBlock, DeviceMemory


class BlockSizes(Struct, frozen=True, kw_only=True):
    """Sizes of the blocks of device memory, in bytes.

    Attributes:
        most: Maximum bytes of a part in one block, unless one tensor is larger. It does not depend
            on the block's own size: the same tensors always give the same chunks.
        least: Bytes of a block of which no earlier part gives an estimate.
    """

    most: int = 1 << 30
    least: int = 16 << 20


class BlockPool:
    """Blocks for one part, which are written only while they have no readers."""

    def __init__(
        self, memory: DeviceMemory, expected: Sequence[int] = (), least: int = BlockSizes().least
    ) -> None:
        self._least = least
        self._memory = memory
        self._expected = expected
        self._blocks: list[DeviceBlock] = []

    def block(self, number: int, nbytes: int) -> DeviceBlock:
        """Return block ``number`` with space for ``nbytes``; create it if it is the next one.

        It may be another block than before, with the part's present bytes copied into it.

        Raises GpuUnusable when the device has no memory left.
        """
        if number == len(self._blocks):
            usual = self._expected[number] if number < len(self._expected) else self._least
            self._blocks.append(self._allocate(max(nbytes, usual)))
        old = self._blocks[number]
        if len(old.tensor) < nbytes:
            # By a quarter, so that a part that grows tensor by tensor is seldom copied.
            grown = self._allocate(max(nbytes, len(old.tensor) * 5 // 4))
            lane = self._memory.lane
            lane.copy(grown.tensor[: len(old.tensor)], old.tensor)
            # The copy reads the old block until then.
            lane.wait(lane.mark())
            self._blocks[number] = grown
            self._memory.free(old)
        return self._blocks[number]

    def trim(self, blocks: int) -> None:
        """Free all blocks but the first ``blocks``."""
        while len(self._blocks) > blocks:
            self._memory.free(self._blocks.pop())

    def _allocate(self, nbytes: int) -> DeviceBlock:
        # a tensor made in inference mode cannot be written outside of it
        with torch.inference_mode(False):
            return self._memory.allocate(nbytes + -nbytes % ALIGNMENT)
