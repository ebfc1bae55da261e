"""Parts in shared memory, for processes of one user on one host.

A part is one segment: a header page, the part's bytes, its manifest. The publisher holds an
exclusive lock while it writes the segment, and renames it to the part's name once it is sealed. A
reader holds a shared lock while it reads. A segment is reused only under the exclusive lock, so
never while it has readers. Locks end with their processes.

A part that is being written has another name, and its bytes can be digested as they arrive: see
:mod:`~trinity_events.weights.transports.shared_memory.reading`.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ....errors import SharedMemoryUnusable, VersionNotStored
from ....system.shared_memory import SHARED_MEMORY, Owner, Segment, owned, sweep, users_folder
from ...errors import PartClosed
from ..base import Ended, OnPart, PartRef
from .reading import (
    DATA,
    FILLED,
    FILLED_AT,
    HEADER,
    MAGIC,
    WRITING,
    WRITING_AT,
    Mapping,
    PartPrefetch,
    SharedMemorySource,
    WriteDigests,
    file_name,
    leased,
    name_while_written,
    prefetch,
    release_lease,
)

CHUNK_BYTES = 512 << 10
"""Bytes of a chunk; small enough to be digested while it is in the processor's cache."""
MOST_SEGMENTS = 8
"""Maximum segments of one publisher: two versions are kept, two more for evaluations, one is
written, and others are being read."""


class SharedMemoryStore:
    """Implements :class:`~trinity_events.weights.ChunkStore`.

    Its parts exist until it is closed or its process ends.

    Args:
        root: Mount point of the shared memory.
        most: Maximum segments of this publisher.
    """

    name = "shm"

    def __init__(self, root: Path = SHARED_MEMORY, *, most: int = MOST_SEGMENTS) -> None:
        self._root = root
        self._most = most
        self._owner: Owner | None = None
        self._idle: list[Segment] = []
        self._sealed: dict[PartRef, Segment] = {}
        self._bases: dict[PartRef, PartRef | None] = {}
        """Base of each published part, or None."""
        self._sink: SharedMemorySink | None = None
        self._made = 0
        self._last_size = 0
        self._mappings: dict[tuple[int, int], Mapping] = {}
        self._seen: dict[PartRef, WriteDigests] = {}
        self.followers: list[PartPrefetch] = []
        self._swept = False

    # --- publishing ------------------------------------------------------------------------

    def begin(self, part: PartRef, chunk_bytes: int | None = None) -> SharedMemorySink:
        """Begin a part; an unsealed part that was begun earlier is discarded."""
        if self._sink is not None:
            self._sink.discard()
        self._sink = SharedMemorySink(self, part, chunk_bytes or CHUNK_BYTES)
        return self._sink

    def delete(self, part: PartRef) -> None:
        """Delete the part; its memory is reused once it has no readers."""
        segment = self._sealed.pop(part, None)
        self._bases.pop(part, None)
        if segment is not None:
            self._set_aside(segment)

    def acquire_segment(self, rank: int) -> Segment:
        """Return a segment without readers, locked for writing."""
        for segment in self._idle:
            # Its lock fails while any process reads it.
            if segment.take():
                self._idle.remove(segment)
                return segment
        most = self._most * len({part.rank for part in self._sealed} | {rank})
        if len(self._idle) + len(self._sealed) < most:
            return self._new_segment()
        # If the reducer retires no version, or late, the oldest are reused anyway.
        # Deltas that are kept rest on them.
        needed = set(self._bases.values())
        for part, segment in self._sealed.items():
            if part not in needed and segment.take():
                del self._sealed[part], self._bases[part]
                segment.rename(self._unused_path())
                return segment
        raise SharedMemoryUnusable("in use", segments=most)

    def add_part(
        self, part: PartRef, segment: Segment, nbytes: int, base: PartRef | None = None
    ) -> None:
        """Rename a complete segment to the part's name."""
        # Before the rename: readers map the segment as soon as they find it.
        segment.trim(nbytes)
        self._last_size = nbytes
        self.delete(part)  # remove the result of an earlier attempt
        segment.rename(segment.path.with_name(file_name(part)))
        # After the rename: a reader that gets the lock must find the part's name.
        segment.give()
        self._sealed[part], self._bases[part] = segment, base
        self._sink = None

    def expose(self, part: PartRef, segment: Segment) -> None:
        """Rename a segment so that prefetching readers find it."""
        segment.rename(segment.path.with_name(name_while_written(part)))

    def return_segment(self, segment: Segment) -> None:
        """Return the segment of a discarded part to the idle ones."""
        segment.rename(self._unused_path())  # prefetching readers no longer find it
        segment.give_back(self._last_size)
        segment.give()
        self._idle.append(segment)

    def _new_segment(self) -> Segment:
        if self._owner is None:
            self._sweep()
            self._owner = Owner(self._root)
        segment = Segment(self._unused_path())
        try:
            segment.take()
            segment.memory(self._last_size)
        except BaseException:
            segment.close()
            raise
        return segment

    def _set_aside(self, segment: Segment) -> None:
        segment.rename(self._unused_path())
        self._idle.append(segment)

    def _unused_path(self) -> Path:
        assert self._owner is not None
        self._made += 1
        return self._owner.folder / f"unused-{self._made}"

    # --- reading ---------------------------------------------------------------------------

    def open(self, part: PartRef) -> SharedMemorySource | None:
        """Return the part under a new lease, or None if it is missing."""
        self._sweep()
        self._unmap_gone()
        for path in self._newest_first(file_name(part)):
            with suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    if leased(descriptor, path):
                        memory = self._map(descriptor)
                        return SharedMemorySource(part, descriptor, memory, self._seen.get(part))
                except BaseException:
                    release_lease(descriptor)
                    raise
                os.close(descriptor)
        return None

    def prefetch(
        self,
        parts: Sequence[PartRef],
        stop: threading.Event,
        deadline: float,
        on_part: OnPart | None = None,
    ) -> Ended:
        """Digest the parts' chunks as they are written; drop the digests of other parts."""
        self._sweep()
        self._unmap_gone()
        self._seen = {}
        self.followers = [
            PartPrefetch(part, self._newest_first, self._map, on_part) for part in parts
        ]
        try:
            return prefetch(self.followers, stop, deadline)
        finally:
            for follower in self.followers:
                follower.close()
                if follower.seen is not None:
                    self._seen[follower.part] = follower.seen
            self.followers = []

    def missing(self, part: PartRef) -> VersionNotStored:
        """Return the error of a part that is missing here."""
        is_retired = any(users_folder(self._root).glob(f"*/{part.run_id}~*"))
        return VersionNotStored(
            str(part),
            fault="retired from shared memory" if is_retired else "shared memory",
            place=str(self._root),
        )

    def _newest_first(self, name: str) -> list[Path]:
        folder = users_folder(self._root)
        entries: list[tuple[int, Path]] = []
        for path in folder.glob(f"*/{name}") if owned(folder) else ():
            with suppress(FileNotFoundError):
                # By the time of the rename: a restarted publisher may have published the part
                # again.
                entries.append((path.stat().st_ctime_ns, path))
        return [path for _, path in sorted(entries, reverse=True)]

    def _map(self, descriptor: int) -> memoryview:
        """Return the segment's memory, which is mapped once for all its versions."""
        self._unmap_gone()
        while True:
            status = os.fstat(descriptor)
            key = (status.st_dev, status.st_ino)
            mapping = self._mappings.pop(key, None)
            if mapping is None or len(mapping.memory) != status.st_size:
                if mapping is not None:
                    mapping.close()
                try:
                    mapping = Mapping(descriptor, status.st_size)
                except ValueError:
                    # its writer trimmed it between the two calls, which happens once, at the seal
                    continue
            self._mappings[key] = mapping
            return mapping.memory

    def _unmap_gone(self) -> None:
        """Unmap segments that were removed: the next version may need their memory."""
        for key in [key for key, mapping in self._mappings.items() if mapping.is_gone()]:
            self._mappings.pop(key).close()

    # --- both ------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove the published parts and unmap the parts that were read."""
        if self._sink is not None:
            self._sink.discard()
            self._sink = None
        segments = [*self._idle, *self._sealed.values()]
        self._idle, self._sealed, self._bases = [], {}, {}
        for segment in segments:
            segment.close()
        for mapping in self._mappings.values():
            mapping.close()
        self._mappings = {}
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    def _sweep(self) -> None:
        """Remove the segments of dead processes, once: this store may need their memory."""
        if not self._swept:
            self._swept = True
            sweep(self._root)


class SharedMemorySink:
    """Implements :class:`~trinity_events.weights.PartSink` with consecutive chunks."""

    def __init__(self, store: SharedMemoryStore, part: PartRef, chunk_bytes: int) -> None:
        self._store = store
        self._part = part
        self._chunk_bytes = chunk_bytes
        self._segment: Segment | None = None
        self._filled = 0
        self._open, self._sealed = True, False

    @property
    def segment(self) -> Segment:
        """Segment to which the part is written."""
        return self._writing()

    def reserve(self) -> memoryview:
        """Return the chunk's final place in the segment."""
        return self._writing().room(DATA + self._filled, self._chunk_bytes)

    def commit(self, nbytes: int) -> None:
        """Count the chunk as final, so that prefetching readers see it."""
        self._filled += nbytes
        # After the bytes: readers digest what the counter covers.
        FILLED.pack_into(self._writing().memory(DATA), FILLED_AT, self._filled)

    def seal(self, manifest: bytes, base: PartRef | None = None) -> None:
        """Add manifest and header, and rename the segment to the part's name."""
        end = DATA + self._filled + len(manifest)
        memory = self._writing().memory(end)
        memory[end - len(manifest) : end] = manifest
        memory[: HEADER.size] = HEADER.pack(MAGIC, self._filled, len(manifest))
        self._store.add_part(self._part, self._writing(), end, base)
        self._open, self._sealed, self._segment = False, True, None

    def discard(self) -> None:
        """Return the segment to the store; a sealed part is deleted."""
        if self._segment is not None:
            self._store.return_segment(self._segment)
        elif self._sealed:
            self._store.delete(self._part)
        self._open = self._sealed = False
        self._segment = None

    def _writing(self) -> Segment:
        if not self._open:
            raise PartClosed(str(self._part))
        if self._segment is None:
            self._segment = self._store.acquire_segment(self._part.rank)
            self._begin(self._segment)
        return self._segment

    def _begin(self, segment: Segment) -> None:
        segment.room(DATA, self._chunk_bytes)  # a new segment gets space for whole chunks
        header = segment.memory(DATA)
        # Before it is exposed: a reader must not see counters or a header of the former part.
        header[:DATA] = bytes(DATA)
        WRITING.pack_into(header, WRITING_AT, secrets.token_bytes(8), self._chunk_bytes)
        self._store.expose(self._part, segment)
