"""Sink that publishes a part by copies from device to device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from trinity_schemas import Chunk

from ...devices.buckets import GatheredCopies
from ...devices.device_to_host import DeviceRuns
from ...devices.digests import digest_all
from ...tensors import flat_bytes
from ..base import PartRef
from ..shared_memory.store import SharedMemorySink
from .block_pool import BlockPool
from .layout import LentBlock, PartBlocks, encode_layout
from .memory import DeviceBlock, DeviceMemory


class BlockRooms(Protocol):
    """Blocks of a publisher, which its store divides among parts."""

    def find_pool(self, file: SharedMemorySink) -> BlockPool:
        """Return the blocks of a part that is being written. Raises ValueError for another."""
        ...

    def record_use(self, regions: Sequence[int]) -> None:
        """Record the bytes that a part used of each block."""
        ...


class CudaSink:
    """Implements :class:`~trinity_events.weights.TensorSink`.

    Copies run beside the device's other work. The sink waits for all of them at the end.
    """

    def __init__(
        self,
        rooms: BlockRooms,
        memory: DeviceMemory,
        file: SharedMemorySink,
        chunk_bytes: int,
        block_bytes: int,
    ) -> None:
        self._block_bytes = block_bytes
        self._rooms = rooms
        self._memory = memory
        self._file = file
        self._chunk_bytes = chunk_bytes
        self._blocks: list[DeviceBlock] = []
        """Blocks that contain bytes of the part."""
        self._begin = self._filled = 0
        """Offset in the part of the last block, and the bytes filled in it."""
        self._regions: list[int] = []
        """Bytes of the part in each block but the last."""

    def write(self, tensor: torch.Tensor, offset: int) -> None:
        """Begin to copy a tensor to its offset of the part."""
        if not tensor.nbytes:
            return
        self._memory.near(tensor)
        at = self._place(offset, tensor.nbytes)
        lane = self._memory.lane
        lane.begin()  # after the operations that compute the tensor
        lane.copy(self._blocks[-1].tensor[at : at + tensor.nbytes], flat_bytes(tensor))
        self._filled = at + tensor.nbytes
        if tensor.is_cpu:
            # The caller may change host memory as soon as this returns.
            lane.wait(lane.mark())
        else:  # later operations may overwrite the tensor
            lane.hold_back(lane.mark())

    def write_all(
        self, tensors: Sequence[torch.Tensor], offsets: Sequence[int], runs: DeviceRuns | None
    ) -> None:
        """Begin to copy tensors; small ones are gathered, and copied a bucket at a time."""
        if runs is None:
            for tensor, offset in zip(tensors, offsets, strict=True):
                self.write(tensor, offset)
            return
        copies: GatheredCopies | None = None
        for run in runs.runs:
            if run.bucket is None:
                self.write(tensors[run.first], offsets[run.first])
                continue
            self._memory.near(tensors[run.first])
            copies = copies or GatheredCopies(self._memory.lane)
            at = self._place(offsets[run.first], run.bucket.end)
            end = at + run.bucket.end
            copies.copy(self._blocks[-1].tensor[at:end], run.bucket, tensors, run.first)
            self._filled = end
        if copies is not None:
            self._memory.lane.hold_back(self._memory.lane.mark())

    def chunks(self, nbytes: int) -> list[Chunk]:
        """Wait for all copies, and digest the part."""
        if not self._blocks:
            return []
        self._room()  # raises if the blocks belong to another part by now
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
            for data, digest in zip(cut, digest_all(cut), strict=True)
        ]

    def seal(self, manifest: bytes, base: PartRef | None = None) -> None:
        """Write the layout to the file and give the file the part's name."""
        device = ""
        if self._blocks:
            self._room().trim(len(self._blocks))
            device = self._memory.device
        lent = zip(self._blocks, self._regions, strict=True)
        blocks = tuple(LentBlock(block.handle, region) for block, region in lent)
        data = encode_layout(PartBlocks(device, blocks))
        self._file.reserve()[: len(data)] = data
        self._file.commit(len(data))
        # After the digests, which waited for all copies: readers map the blocks from now on.
        self._file.seal(manifest, base)
        self._rooms.record_use(self._regions)

    def discard(self) -> None:
        """Return the blocks once no copy into them is pending."""
        try:
            if self._blocks:
                lane = self._memory.lane
                lane.wait(lane.mark())
        finally:  # a GPU that does not respond writes nothing either
            self._file.discard()

    def _place(self, offset: int, nbytes: int) -> int:
        """Return the tensor's offset in the last block, which may be a new block."""
        room = self._room()
        at = offset - self._begin
        if self._blocks:
            self._fill(at)
        if not self._blocks or at + nbytes > self._block_bytes:
            if self._blocks:
                self._regions.append(at)
            self._blocks.append(room.block(len(self._blocks), nbytes))
            self._begin, self._filled = offset, 0
            return 0
        self._blocks[-1] = room.block(len(self._blocks) - 1, at + nbytes)
        return at

    def _room(self) -> BlockPool:
        """Return the part's blocks. Raises ValueError if the part was discarded."""
        return self._rooms.find_pool(self._file)

    def _fill(self, until: int) -> None:
        """Fill the gap between two tensors with zeros."""
        gap = self._blocks[-1].tensor[self._filled : until]  # uint8 (gap,)
        if len(gap):
            zeros, lane = torch.zeros_like(gap), self._memory.lane
            lane.begin()  # after the operation that makes the zeros
            lane.copy(gap, zeros)
        self._filled = until
