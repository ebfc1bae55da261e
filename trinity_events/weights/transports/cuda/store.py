"""Parts in a GPU's memory, for processes of one user on one host that see that GPU (CUDA IPC).

A part's bytes stay on the device. What is in shared memory is its file: the manifest, and by which
handles the memory is found; its locks are the part's. So a room is written again, or freed, only
while nobody reads it, and what a dead publisher left is swept, as with shared memory. The device's
memory ends with its process.

Not for deltas, which are found on the host.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from ....errors import VersionUnavailable
from ..base import PartRef
from ..shared_memory.segments import SHARED_MEMORY, Segment
from ..shared_memory.store import SharedMemorySink, SharedMemoryStore
from .block_pool import BlockPool
from .memory import CudaMemory, DeviceMemory
from .sink import CudaSink
from .source import CudaSource

CHUNK_BYTES = 16 << 20
MOST_ROOMS = 4
"""Of one publisher. Two versions are kept and one is written; a fourth while one more is read."""


class CudaStore:
    """Implements :class:`~trinity_events.weights.ChunkStore`.

    Args:
        memory: The device's; by default the GPU's that :class:`CudaMemory` takes.
        root: Where shared memory is mounted.
        most: The most parts that this publisher may have on the device.

    Raises GpuUnusable where there is no GPU.
    """

    name = "cuda"

    def __init__(
        self,
        memory: DeviceMemory | None = None,
        root: Path = SHARED_MEMORY,
        *,
        most: int = MOST_ROOMS,
    ) -> None:
        self._memory = memory or CudaMemory()
        self._files = SharedMemoryStore(root, most=most)
        self._rooms: MutableMapping[Segment, BlockPool] = WeakKeyDictionary()
        self._last: Sequence[int] = ()
        self._why: VersionUnavailable | None = None

    # --- publishing ------------------------------------------------------------------------

    def begin(self, part: PartRef, chunk_bytes: int | None = None) -> CudaSink:
        """Begin a part; one that was begun before and is not sealed is given up."""
        return CudaSink(self, self._memory, self._files.begin(part), chunk_bytes or CHUNK_BYTES)

    def room_of(self, file: SharedMemorySink) -> BlockPool:
        """The memory that goes with a file, which nobody reads.

        Raises ValueError when the file is sealed or given up: then another part may have it.
        """
        if file.segment not in self._rooms:
            self._rooms[file.segment] = BlockPool(self._memory, self._last)
        return self._rooms[file.segment]

    def took(self, regions: Sequence[int]) -> None:
        """A part took so many bytes of each of its blocks: so will the next one, presumably."""
        self._last = regions

    def delete(self, part: PartRef) -> None:
        """Forget the part; its memory is used again once nobody reads it."""
        self._files.delete(part)

    # --- reading ---------------------------------------------------------------------------

    def open(self, part: PartRef) -> CudaSource | None:
        """The part under a lease of ours, or None when it is not there."""
        self._why = None
        file = self._files.open(part)
        if file is None:
            return None
        try:
            return CudaSource(part, file, self._memory)
        except VersionUnavailable as error:
            self._why = error
            return None

    def missing(self, part: PartRef) -> str:
        """Why the part may not be there, in words."""
        return str(self._why or self._files.missing(part))

    # --- both ------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove what is published here; what somebody still reads is freed with the process."""
        rooms = list(self._rooms.items())
        self._rooms.clear()
        try:
            if rooms:  # else nothing was copied here, and the device may never have been used
                self._memory.lane.wait(self._memory.lane.mark())
            for segment, room in rooms:
                if segment.take():
                    room.trim(0)
        finally:
            self._files.close()
