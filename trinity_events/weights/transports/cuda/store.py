"""Parts in a GPU's memory, for processes of one user and host that see that GPU (CUDA IPC).

A part's bytes stay on the device. Its file in shared memory holds the manifest and the handles of
the device memory. The file's locks are the part's locks. So a block is rewritten or freed only
while it has no readers. The files of a dead publisher are removed, as with shared memory. Its
device memory ends with its process.

This transport has no deltas, which are computed on the host.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from ....errors import VersionNotStored
from ....system.shared_memory import SHARED_MEMORY, Segment
from ..base import PartRef
from ..shared_memory.store import SharedMemorySink, SharedMemoryStore
from .block_pool import BlockPool, BlockSizes
from .memory import CudaMemory, DeviceMemory
from .sink import CudaSink
from .source import CudaSource

CHUNK_BYTES = 16 << 20
MOST_ROOMS = 6
"""Maximum parts of one publisher: two kept, two for evaluations, one written, one being read."""


class CudaStore:
    """Implements :class:`~trinity_events.weights.ChunkStore`.

    Args:
        memory: Device memory; by default that of the GPU that :class:`CudaMemory` chooses.
        root: Mount point of the shared memory.
        most: Maximum parts of this publisher on the device.
        sizes: Sizes of the blocks of its memory.

    Raises GpuUnusable where there is no GPU.
    """

    name = "cuda-ipc"

    def __init__(
        self,
        memory: DeviceMemory | None = None,
        root: Path = SHARED_MEMORY,
        *,
        most: int = MOST_ROOMS,
        sizes: BlockSizes = BlockSizes(),
    ) -> None:
        self._sizes = sizes
        self._memory = memory or CudaMemory()
        self._files = SharedMemoryStore(root, most=most)
        # By segment: its locks say whether the blocks have readers.
        self._rooms: MutableMapping[Segment, BlockPool] = WeakKeyDictionary()
        self._last: Sequence[int] = ()
        self._why: VersionNotStored | None = None

    # --- publishing ------------------------------------------------------------------------

    def begin(self, part: PartRef, chunk_bytes: int | None = None) -> CudaSink:
        """Begin a part; an unsealed part that was begun earlier is discarded."""
        return CudaSink(
            self,
            self._memory,
            self._files.begin(part),
            chunk_bytes or CHUNK_BYTES,
            self._sizes.most,
        )

    def find_pool(self, file: SharedMemorySink) -> BlockPool:
        """Return the blocks that belong to a file without readers.

        Raises ValueError if the file is sealed or discarded: another part may have its blocks then.
        """
        if file.segment not in self._rooms:
            self._rooms[file.segment] = BlockPool(self._memory, self._last, self._sizes.least)
        return self._rooms[file.segment]

    def record_use(self, regions: Sequence[int]) -> None:
        """Record the bytes that a part used of each block, as an estimate for the next part."""
        self._last = regions

    def delete(self, part: PartRef) -> None:
        """Delete the part; its memory is reused once it has no readers."""
        self._files.delete(part)

    # --- reading ---------------------------------------------------------------------------

    def open(self, part: PartRef) -> CudaSource | None:
        """Return the part under a new lease, or None if it is missing."""
        self._why = None
        file = self._files.open(part)
        if file is None:
            return None
        try:
            return CudaSource(part, file, self._memory)
        except VersionNotStored as error:
            # The port returns None for an absent part; missing() gives the reason.
            self._why = error
            return None

    def missing(self, part: PartRef) -> VersionNotStored:
        """Return the error of a part that is missing here."""
        if self._why is None:
            return self._files.missing(part)
        self._why.version = str(part)
        return self._why

    # --- both ------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove the published parts; blocks with readers are freed when the process ends."""
        rooms = list(self._rooms.items())
        self._rooms.clear()
        try:
            if rooms:  # without blocks nothing was copied, and the device may never have been used
                self._memory.lane.wait(self._memory.lane.mark())
            for segment, room in rooms:
                # A reader in another process may still copy from blocks that it has mapped.
                if segment.take():
                    room.trim(0)
        finally:
            self._files.close()
