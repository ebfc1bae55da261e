"""Publishing a part by copies from device to device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trinity_schemas import Chunk

from ...devices.digests import digests_of
from ...tensors import flat_bytes
from ..base import PartRef
from ..shared_memory.store import SharedMemorySink
from .block_pool import BlockPool
from .layout import Layout, LentBlock, encoded
from .memory import Block, DeviceMemory

if TYPE_CHECKING:
    from .store import CudaStore

BLOCK_BYTES = 1 << 30
"""Of a part in one block, but for a larger tensor.

Whatever a block's own size is: the same tensors make the same chunks.
"""


class CudaSink:
    """Implements :class:`~trinity_events.weights.TensorSink`.

    Copies are begun, beside what the device computes, and waited for once all are.
    """

    def __init__(
        self,
        store: CudaStore,
        memory: DeviceMemory,
        file: SharedMemorySink,
        chunk_bytes: int,
    ) -> None:
        self._store = store
        self._memory = memory
        self._file = file
        self._chunk_bytes = chunk_bytes
        self._blocks: list[Block] = []
        """Those that have something of the part."""
        self._begin = self._filled = 0
        """Where the last of them begins in the part, and how far it is filled."""
        self._regions: list[int] = []
        """How much of each but the last the part takes."""

    def take(self, tensor: torch.Tensor, offset: int) -> None:
        """Begin to copy a tensor to where it begins in the part."""
        if not tensor.nbytes:
            return
        self._memory.near(tensor)
        at = self._place(offset, tensor.nbytes)
        lane = self._memory.lane
        lane.begin()  # behind what computed the tensor
        lane.copy(self._blocks[-1].tensor[at : at + tensor.nbytes], flat_bytes(tensor))
        self._filled = at + tensor.nbytes
        if tensor.is_cpu:
            lane.wait(lane.mark())
        else:  # whoever gave it may compute something else into it
            lane.hold_back(lane.mark())

    def chunks(self, nbytes: int) -> list[Chunk]:
        """Wait until all is copied, and digest it."""
        if not self._blocks:
            return []
        self._room()  # which must not be another part's by now
        self._fill(nbytes - self._begin)
        self._regions.append(nbytes - self._begin)
        lane = self._memory.lane
        lane.wait(lane.mark())
        cut = [
            block.tensor[begin : min(begin + self._chunk_bytes, region)]
            for block, region in zip(self._blocks, self._regions, strict=True)
            for begin in range(0, region, self._chunk_bytes)
        ]
        return [
            Chunk(nbytes=len(data), digest=digest)
            for data, digest in zip(cut, digests_of(cut), strict=True)
        ]

    def seal(self, manifest: bytes, base: PartRef | None = None) -> None:
        """Say where it lies, and give the file the part's name."""
        device = ""
        if self._blocks:
            self._room().trim(len(self._blocks))
            device = self._memory.device
        lent = zip(self._blocks, self._regions, strict=True)
        blocks = tuple(LentBlock(block.handle, region) for block, region in lent)
        said = encoded(Layout(device, blocks))
        self._file.reserve()[: len(said)] = said
        self._file.commit(len(said))
        self._file.seal(manifest, base)
        self._store.took(self._regions)

    def discard(self) -> None:
        """Give the room back, once nothing is copied into it any more."""
        try:
            if self._blocks:
                lane = self._memory.lane
                lane.wait(lane.mark())
        finally:  # a GPU that answers no more writes nothing either
            self._file.discard()

    def _place(self, offset: int, nbytes: int) -> int:
        """Where in the last block a tensor goes; it may be another one from now on."""
        room = self._room()
        at = offset - self._begin
        if self._blocks:
            self._fill(at)
        if not self._blocks or at + nbytes > BLOCK_BYTES:
            if self._blocks:
                self._regions.append(at)
            self._blocks.append(room.block(len(self._blocks), nbytes))
            self._begin, self._filled = offset, 0
            return 0
        self._blocks[-1] = room.block(len(self._blocks) - 1, at + nbytes)
        return at

    def _room(self) -> BlockPool:
        """Raises ValueError when the part is given up."""
        return self._store.room_of(self._file)

    def _fill(self, until: int) -> None:
        """Zeros between two tensors, whatever lay there before."""
        gap = self._blocks[-1].tensor[self._filled : until]
        if len(gap):
            zeros, lane = torch.zeros_like(gap), self._memory.lane
            lane.begin()  # behind them
            lane.copy(gap, zeros)
        self._filled = until
