"""Memory that a publisher lends, used again for one part after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trinity_schemas import ALIGNMENT

from .memory import Block, DeviceMemory

_LEAST = 16 << 20


class BlockPool:
    """Blocks for one part. What they have is written while nobody reads it.

    Args:
        memory: Where they come from.
        expected: Bytes that the part will take of each block, as far as the last one tells.
    """

    def __init__(self, memory: DeviceMemory, expected: Sequence[int] = ()) -> None:
        self._memory = memory
        self._expected = expected
        self._blocks: list[Block] = []

    def block(self, number: int, nbytes: int) -> Block:
        """A block with place for so many bytes, for one that is there or the next.

        It may be another than before; what the part has in it already is there too.

        Raises GpuUnusable when the device has no memory left.
        """
        if number == len(self._blocks):
            usual = self._expected[number] if number < len(self._expected) else _LEAST
            self._blocks.append(self._allocated(max(nbytes, usual)))
        old = self._blocks[number]
        if len(old.tensor) < nbytes:
            grown = self._allocated(max(nbytes, len(old.tensor) * 5 // 4))
            lane = self._memory.lane
            lane.copy(grown.tensor[: len(old.tensor)], old.tensor)
            lane.wait(lane.mark())
            self._blocks[number] = grown
            self._memory.free(old)
        return self._blocks[number]

    def trim(self, blocks: int) -> None:
        """Give back all but the first ones."""
        while len(self._blocks) > blocks:
            self._memory.free(self._blocks.pop())

    def _allocated(self, nbytes: int) -> Block:
        with torch.inference_mode(False):  # else nobody could write to it but in that mode
            return self._memory.allocate(nbytes + -nbytes % ALIGNMENT)
