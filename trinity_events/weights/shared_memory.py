"""Parts in shared memory, for processes of one user on one host.

A part is one segment: a page with its header, its bytes, its manifest. The publisher holds an
exclusive lock while it writes one, and gives it the part's name once it is whole. A reader holds a
shared lock for as long as it reads. A segment is written again only under the exclusive lock, so
never while anybody reads it; and locks end with their processes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trinity_schemas.codec import MAX_MANIFEST_BYTES

from ..errors import CorruptVersion, SharedMemoryUnusable
from .base import Check, PartRef
from .segments import SHARED_MEMORY, Owner, Segment, locked, owned, sweep, users_folder

CHUNK_BYTES = 256 << 10
"""Small enough to be digested while it is still in the processor's cache."""
MOST_SEGMENTS = 8
"""Of one publisher. Two versions are kept and one is written; others are there while read."""
_MAGIC = b"trinity1"
_HEADER = struct.Struct("<8sQQ")
_DATA = 4096
_POPULATED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


class SharedMemoryStore:
    """Implements :class:`~trinity_events.weights.ChunkStore`.

    What it keeps is there until it is closed, or its process ends.

    Args:
        root: Where shared memory is mounted.
        most: The most segments that this publisher may have.
    """

    name = "shm"

    def __init__(self, root: Path = SHARED_MEMORY, *, most: int = MOST_SEGMENTS) -> None:
        self._root = root
        self._most = most
        self._owner: Owner | None = None
        self._idle: list[Segment] = []
        self._sealed: dict[PartRef, Segment] = {}
        self._sink: SharedMemorySink | None = None
        self._made = 0
        self._last_size = 0
        self._mappings: dict[tuple[int, int], _Mapping] = {}
        self._swept = False

    # --- publishing ------------------------------------------------------------------------

    def begin(self, part: PartRef, chunk_bytes: int | None = None) -> SharedMemorySink:
        """Begin a part; one that was begun before and is not sealed is given up."""
        if self._sink is not None:
            self._sink.discard()
        self._sink = SharedMemorySink(self, part, chunk_bytes or CHUNK_BYTES)
        return self._sink

    def delete(self, part: PartRef) -> None:
        """Forget the part; its memory is used again once nobody reads it."""
        segment = self._sealed.pop(part, None)
        if segment is not None:
            self._set_aside(segment)

    def take(self) -> Segment:
        """A segment that nobody reads, locked for writing."""
        for segment in self._idle:
            if segment.take():
                self._idle.remove(segment)
                return segment
        if len(self._idle) + len(self._sealed) < self._most:
            return self._new_segment()
        # The reducer retires no versions, or late: the oldest here are superseded all the same.
        for part, segment in self._sealed.items():
            if segment.take():
                del self._sealed[part]
                segment.rename(self._unused_path())
                return segment
        raise SharedMemoryUnusable(
            f"all {self._most} segments of this publisher are being read: explorers of the run "
            "are stuck; see trinity-events status"
        )

    def keep(self, part: PartRef, segment: Segment, nbytes: int) -> None:
        """Let a segment that is whole be found by the part's name."""
        segment.trim(nbytes)
        self._last_size = nbytes
        self.delete(part)  # what an earlier attempt at the part left
        segment.rename(segment.path.with_name(_file_name(part)))
        segment.give()
        self._sealed[part] = segment
        self._sink = None

    def put_back(self, segment: Segment) -> None:
        """Take back a segment that will not be whole."""
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
        """The part under a lease of ours, or None when it is not there."""
        self._sweep()
        for path in self._newest_first(_file_name(part)):
            with suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    if _leased(descriptor, path):
                        return SharedMemorySource(part, descriptor, self._mapped(descriptor))
                except BaseException:
                    _let_go(descriptor)
                    raise
                os.close(descriptor)
        return None

    def missing(self, part: PartRef) -> str:
        """Why the part may not be there, in words."""
        if any(users_folder(self._root).glob(f"*/{part.run_id}~*")):
            return f"retired from this host's shared memory ({self._root})"
        return (
            f"nothing of the run is in this host's shared memory ({self._root}): its trainer "
            "ended, or is on another host, in another container or another user's; "
            "for such explorers start it with --weights redis"
        )

    def _newest_first(self, name: str) -> list[Path]:
        folder = users_folder(self._root)
        found: list[tuple[int, Path]] = []
        for path in folder.glob(f"*/{name}") if owned(folder) else ():
            with suppress(FileNotFoundError):
                found.append((path.stat().st_ctime_ns, path))
        return [path for _, path in sorted(found, reverse=True)]

    def _mapped(self, descriptor: int) -> memoryview:
        """The segment's memory, mapped once for all versions that come in it."""
        for key in [key for key, one in self._mappings.items() if one.is_gone()]:
            self._mappings.pop(key).close()
        found = os.fstat(descriptor)
        key = (found.st_dev, found.st_ino)
        mapping = self._mappings.pop(key, None)
        if mapping is None or len(mapping.memory) != found.st_size:
            if mapping is not None:
                mapping.close()
            mapping = _Mapping(descriptor, found.st_size)
        self._mappings[key] = mapping
        return mapping.memory

    # --- both ------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove what is published here, and let go of what was read."""
        if self._sink is not None:
            self._sink.discard()
            self._sink = None
        segments = [*self._idle, *self._sealed.values()]
        self._idle, self._sealed = [], {}
        for segment in segments:
            segment.close()
        for mapping in self._mappings.values():
            mapping.close()
        self._mappings = {}
        if self._owner is not None:
            self._owner.close()
            self._owner = None

    def _sweep(self) -> None:
        """Once, before anything else: what the dead left may be what we lack."""
        if not self._swept:
            self._swept = True
            sweep(self._root)


class SharedMemorySink:
    """Implements :class:`~trinity_events.weights.base.PartSink`: chunks lie end to end."""

    def __init__(self, store: SharedMemoryStore, part: PartRef, chunk_bytes: int) -> None:
        self._store = store
        self._part = part
        self._chunk_bytes = chunk_bytes
        self._segment: Segment | None = None
        self._filled = 0
        self._open = True

    def room(self) -> memoryview:
        """The place in the segment where the chunk stays."""
        begin = _DATA + self._filled
        return self._writing().memory(begin + self._chunk_bytes)[begin : begin + self._chunk_bytes]

    def put(self, nbytes: int) -> None:
        """The chunk is where it is to be."""
        self._filled += nbytes

    def seal(self, manifest: bytes) -> None:
        """Add manifest and header, and give the segment the part's name."""
        end = _DATA + self._filled + len(manifest)
        memory = self._writing().memory(end)
        memory[end - len(manifest) : end] = manifest
        memory[: _HEADER.size] = _HEADER.pack(_MAGIC, self._filled, len(manifest))
        self._store.keep(self._part, self._writing(), end)
        self._open, self._segment = False, None

    def discard(self) -> None:
        """Give the segment back; a part that is sealed is deleted."""
        if self._segment is not None:
            self._store.put_back(self._segment)
        elif not self._open:
            self._store.delete(self._part)
        self._open, self._segment = False, None

    def _writing(self) -> Segment:
        if not self._open:
            raise ValueError(f"the {self._part} are sealed or given up: nothing can be added")
        if self._segment is None:
            self._segment = self._store.take()
        return self._segment


class SharedMemorySource:
    """Implements :class:`~trinity_events.weights.base.PartSource`: the bytes where they lie.

    While it is open nothing is written to the segment.
    """

    def __init__(self, part: PartRef, descriptor: int, memory: memoryview) -> None:
        self._descriptor = descriptor
        if len(memory) < _DATA:
            raise CorruptVersion(f"the segment of the {part} is too short to be one")
        magic, data, manifest = _HEADER.unpack_from(memory)
        if magic != _MAGIC or manifest > MAX_MANIFEST_BYTES:
            raise CorruptVersion(f"the segment of the {part} has no header that can be used")
        if _DATA + data + manifest > len(memory):
            raise CorruptVersion(f"the segment of the {part} is shorter than its header says")
        self._data = memory[_DATA : _DATA + data]
        self.manifest = bytes(memory[_DATA + data : _DATA + data + manifest])

    def read(self, sizes: Sequence[int], check: Check) -> memoryview:
        """The bytes in the segment itself; nothing is copied."""
        offset = 0
        for index, size in enumerate(sizes):
            check(index, self._data[offset : offset + size])
            offset += size
        return self._data[:offset]

    def close(self) -> None:
        """End the lease."""
        if self._descriptor >= 0:
            _let_go(self._descriptor)
            self._descriptor = -1


class _Mapping:
    """A segment in this process's memory, for reading."""

    def __init__(self, descriptor: int, size: int) -> None:
        if size == 0:
            raise CorruptVersion("a segment of weights is empty")
        self.memory = memoryview(mmap.mmap(descriptor, size, flags=_POPULATED, prot=mmap.PROT_READ))
        self._descriptor = os.dup(descriptor)

    def is_gone(self) -> bool:
        """Whether the segment was removed."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Let go of it; what still looks at the memory keeps it."""
        os.close(self._descriptor)
        self.memory = memoryview(b"")


def _leased(descriptor: int, path: Path) -> bool:
    """Lock a segment for reading, if it still is what its name said when it was opened."""
    if not locked(descriptor, fcntl.LOCK_SH):
        return False  # it is being written again
    return path.stat().st_ino == os.fstat(descriptor).st_ino


def _let_go(descriptor: int) -> None:
    # Unlocked before it is closed, since a mapping has descriptors of the same lock.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _file_name(part: PartRef) -> str:
    return "~".join(map(str, part))
