"""Reader that copies a part from another process's device memory.

CUDA leaves it undefined what a process reads after the owner of the memory has ended. So every byte
is read once: it is copied, the copy is digested, and only the copy is used.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from ....errors import GpuUnusable
from ...devices.digests import digest_all
from ...errors import CorruptPart
from ..base import PartRef
from ..shared_memory.reading import SharedMemorySource
from .layout import decode_layout
from .memory import DeviceMemory


class _Cut(NamedTuple):
    """Location of one chunk in the blocks."""

    number: int
    """Index of the chunk."""
    block: int
    begin: int
    end: int


class CudaSource:
    """Implements :class:`~trinity_events.weights.TensorSource`.

    While it is open the publisher neither writes to the part nor frees it.

    Args:
        part: The part.
        file: Reader of the part's file, with the layout; its lease is the part's. Closed at the
            end.
        memory: Memory of the device.

    Raises VersionUnavailable when the memory is not to be seen from here, and CorruptVersion.
    """

    def __init__(self, part: PartRef, file: SharedMemorySource, memory: DeviceMemory) -> None:
        self.manifest = file.manifest
        self._part = part
        self._exit_stack = ExitStack()
        self._exit_stack.callback(file.close)
        self._lent: list[torch.Tensor] = []
        try:
            layout = decode_layout(file.data, part)
            for lent in layout.blocks:
                # Under the file's lease, which keeps the publisher from freeing the block.
                block = memory.borrow(layout.device, lent.handle, lent.nbytes)
                self._exit_stack.callback(memory.release, block)
                self._lent.append(block.tensor[: lent.nbytes])
        except BaseException:
            self.close()
            raise

    def copy(
        self, sizes: Sequence[int], indices: Container[int] | None = None
    ) -> tuple[Sequence[torch.Tensor], Mapping[int, tuple[int, str]]]:
        """Return copies of the bytes on the device, and size and digest of each chunk."""
        cuts = [cut for cut in self._cut(sizes) if indices is None or cut.number in indices]
        try:
            own = [torch.empty_like(lent) for lent in self._lent]  # uint8 (bytes,) each
        except torch.OutOfMemoryError:
            size = sum(map(len, self._lent))
            raise GpuUnusable("no room to copy", size, str(self._part)) from None
        for cut in cuts:
            self._copy(cut, own[cut.block][cut.begin : cut.end])
        chunks = [own[cut.block][cut.begin : cut.end] for cut in cuts]
        digests = digest_all(chunks)
        return own, {
            cut.number: (len(data), digest)
            for cut, data, digest in zip(cuts, chunks, digests, strict=True)
        }

    def each(
        self, sizes: Sequence[int], indices: Container[int]
    ) -> Iterator[tuple[int, torch.Tensor, str]]:
        """Yield chunks one by one with their digests, in memory that the next chunk overwrites."""
        cuts = [cut for cut in self._cut(sizes) if cut.number in indices]
        if not cuts:
            return
        beside = self._lent[0].new_empty(max(cut.end - cut.begin for cut in cuts))
        for cut in cuts:
            data = beside[: cut.end - cut.begin]
            self._copy(cut, data)
            [digest] = digest_all([data])
            yield cut.number, data, digest

    def close(self) -> None:
        """Unmap the memory, and then end the lease."""
        # Views go first: their memory is unmapped by the stack, and the lease ends last.
        self._lent = []
        self._exit_stack.close()

    def _copy(self, cut: _Cut, into: torch.Tensor) -> None:
        into.copy_(self._lent[cut.block][cut.begin : cut.end])

    def _cut(self, sizes: Sequence[int]) -> Iterator[_Cut]:
        """Yield the locations of chunks of these sizes; chunks behind the blocks' end are short.

        Raises CorruptVersion if the blocks are larger than the part. Access past the end of an
        allocation makes the device unusable for this process.
        """
        if sum(map(len, self._lent)) > sum(sizes):
            raise CorruptPart(version=str(self._part), fault="blocks")
        block = begin = 0
        for index, size in enumerate(sizes):
            if block < len(self._lent) and begin == len(self._lent[block]):
                block, begin = block + 1, 0
            if block == len(self._lent):
                return
            end = min(begin + size, len(self._lent[block]))
            yield _Cut(index, block, begin, end)
            begin = end
