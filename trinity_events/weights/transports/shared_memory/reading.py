"""Layout of a part in a segment of shared memory, and readers of parts: sealed, or being written.

The writer stores in the segment's header how many bytes are final. A prefetching reader digests
them, under a lease that prevents a rewrite of the segment. It compares no digest yet: the announced
manifest exists only at the end. Digests of an abandoned part are dropped.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trinity_schemas.codec import MAX_MANIFEST_BYTES

from ....system.file_locks import try_lock
from ....system.shared_memory import end_beside, read_beside
from ...errors import CorruptPart
from ...tensors import digest
from ..base import Check, Ended, OnChunk, OnPart, PartRef

DATA = 4096
"""Byte at which the data begins, after a page for the header."""
MAGIC = b"trinity1"
HEADER = struct.Struct("<8sQQ")
"""Header of a sealed part: magic, bytes of data, and bytes of the manifest behind the data."""
WRITING = struct.Struct("<8sQ")
"""Header while the part is written: its generation, which is unique, and the bytes of a chunk."""
WRITING_AT = 64
FILLED = struct.Struct("<Q")
"""Number of bytes that will not change any more."""
FILLED_AT = WRITING_AT + WRITING.size
_POPULATED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
_AT_ONCE = 16
"""Maximum chunks digested for one part before the next part has its turn."""
_SHORTEST, _LONGEST = 50e-6, 2e-3
"""Seconds between two reads of the counters, doubled while no bytes arrive."""
_NOT_THERE = 20e-3
"""Maximum seconds between two searches for parts that may not be on this host."""


class WriteDigests(NamedTuple):
    """Digests of a part that were computed while it was written."""

    generation: bytes
    chunk_bytes: int
    digests: list[str]
    """Digests of its first chunks, all of ``chunk_bytes``."""


class SharedMemorySource:
    """Implements :class:`~trinity_events.weights.PartSource` over the mapped bytes.

    No process writes to the segment while it is open.

    Args:
        part: The part.
        descriptor: Descriptor of the segment, locked for reading; closed at the end.
        memory: Mapped memory of the segment.
        seen: Digests computed during the write; ignored if they are of another generation.
    """

    def __init__(
        self, part: PartRef, descriptor: int, memory: memoryview, seen: WriteDigests | None = None
    ) -> None:
        self._descriptor = descriptor
        if len(memory) < DATA:
            raise CorruptPart(version=str(part), fault="segment")
        magic, data, manifest = HEADER.unpack_from(memory)
        if magic != MAGIC or manifest > MAX_MANIFEST_BYTES:
            raise CorruptPart(version=str(part), fault="header")
        if DATA + data + manifest > len(memory):
            raise CorruptPart(version=str(part), fault="contents")
        self._data = memory[DATA : DATA + data]
        self.manifest = bytes(memory[DATA + data : DATA + data + manifest])
        # A segment is reused: digests of an earlier write say nothing about these bytes.
        generation, _ = WRITING.unpack_from(memory, WRITING_AT)
        self._seen = seen if seen is not None and seen.generation == generation else None

    @property
    def data(self) -> memoryview:
        """All bytes of the part, even if they differ from the published ones."""
        return self._data

    def read(
        self, sizes: Sequence[int], check: Check, indices: Container[int] | None = None
    ) -> Sequence[memoryview]:
        """Return the bytes in the segment itself, without a copy."""
        offset = 0
        for index, size in enumerate(sizes):
            if indices is None or index in indices:
                data = self._data[offset : offset + size]
                check(index, data, self._find_digest(index, offset, size))
            offset += size
        return [self._data]

    def _find_digest(self, index: int, offset: int, size: int) -> str | None:
        """Return the chunk's digest if it was computed during the write."""
        seen = self._seen
        if seen is None or index >= len(seen.digests):
            return None
        # The writer may have cut other chunks than it announced, such as where its segment grew.
        there = (offset, size) == (index * seen.chunk_bytes, seen.chunk_bytes)
        return seen.digests[index] if there else None

    def close(self) -> None:
        """End the lease."""
        if self._descriptor >= 0:
            release_lease(self._descriptor)
            self._descriptor = -1


class Mapping:
    """Mapping of a segment into this process, read-only."""

    def __init__(self, descriptor: int, size: int) -> None:
        if size == 0:
            raise CorruptPart(fault="empty")
        self.memory = memoryview(mmap.mmap(descriptor, size, flags=_POPULATED, prot=mmap.PROT_READ))
        # The mapping outlives the descriptor of the lease.
        self._descriptor = os.dup(descriptor)

    def is_gone(self) -> bool:
        """Return True if the segment was removed."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Close the descriptor; views of the memory keep it mapped."""
        os.close(self._descriptor)
        self.memory = memoryview(b"")


def leased(descriptor: int, path: Path) -> bool:
    """Lock a segment for reading; return True if its name still denotes it."""
    # Not waited for: its writer may take long, and the part is gone anyway.
    if not try_lock(descriptor, fcntl.LOCK_SH):
        return False  # it is being rewritten
    # Looked at under the lock: the file may have been renamed between open and lock.
    return path.stat().st_ino == os.fstat(descriptor).st_ino


def release_lease(descriptor: int) -> None:
    """End all leases on a segment and close it."""
    # Unlocked before it is closed: a mapping has duplicates of the descriptor with the same locks.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    end_beside(descriptor)
    os.close(descriptor)


def file_name(part: PartRef) -> str:
    """Return the file name of a sealed part."""
    return "~".join(map(str, part))


def name_while_written(part: PartRef) -> str:
    """Return the file name of a part that is being written."""
    return f"{file_name(part)}~writing"


class PartPrefetch:
    """Prefetch of one part while it is written."""

    def __init__(
        self,
        part: PartRef,
        find: Callable[[str], list[Path]],
        mapped: Callable[[int], memoryview],
        on_part: OnPart | None = None,
    ) -> None:
        self.part = part
        self.sealed = False
        self.seen: WriteDigests | None = None
        self._find = find
        self._mapped = mapped
        self._on_part = on_part
        self._on_chunk: OnChunk | None = None
        self._descriptor = -1
        self._given_up: bytes | None = None
        """Generation of an abandoned write, which is not read again."""

    def advance(self) -> bool:
        """Digest some new chunks; return True if there were any."""
        if self.sealed or (self._descriptor < 0 and not self._open()):
            return False
        # Before the lock is tried: a writer that has sealed left chunks to digest.
        if self._digest():
            return True
        # The writer holds its lock until the part is sealed or given up, or its process ends.
        if try_lock(self._descriptor, fcntl.LOCK_SH):
            self.close()
            self.sealed = bool(self._find(file_name(self.part)))
            if not self.sealed and self.seen is not None:
                self._given_up, self.seen = self.seen.generation, None
        return False

    def close(self) -> None:
        """Release the segment."""
        if self._descriptor >= 0:
            release_lease(self._descriptor)
            self._descriptor = -1

    def _open(self) -> bool:
        """Return True if the part is being written; note if it is sealed already."""
        for path in self._find(name_while_written(self.part)):
            # Its writer may be testing at this moment if the segment has readers.
            with suppress(FileNotFoundError, BlockingIOError):
                self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                try:
                    read_beside(self._descriptor)
                    # The lease prevents a rewrite from now on: check that the name still denotes
                    # the segment.
                    if path.stat().st_ino == os.fstat(self._descriptor).st_ino:
                        memory = self._mapped(self._descriptor)
                        generation, size = WRITING.unpack_from(memory, WRITING_AT)
                        if generation != self._given_up:
                            self.seen = WriteDigests(generation, size, [])
                            if self._on_part is not None:
                                self._on_chunk = self._on_part(self.part)
                            return True
                except BaseException:
                    self.close()
                    raise
                self.close()
        self.sealed = bool(self._find(file_name(self.part)))
        return False

    def _digest(self) -> bool:
        assert self.seen is not None
        _, size, digests = self.seen
        memory = self._mapped(self._descriptor)
        # The counter grows after the bytes are written, so what it covers is final.
        (filled,) = FILLED.unpack_from(memory, FILLED_AT)
        end = min(filled // size, len(digests) + _AT_ONCE) if size else 0
        if end == len(digests) or DATA + end * size > len(memory):
            return False
        for begin in range(DATA + len(digests) * size, DATA + end * size, size):
            chunk = memory[begin : begin + size]
            digested = digest(chunk)
            if self._on_chunk is not None:
                self._on_chunk(len(digests), chunk)
            digests.append(digested)  # appended last: a digested chunk was always taken
        return True


def prefetch(followers: Sequence[PartPrefetch], stop: threading.Event, deadline: float) -> Ended:
    """Advance all prefetches by turns, until each part is sealed or ``deadline`` seconds passed."""
    late = time.monotonic() + deadline
    pause = _SHORTEST
    while not all(follower.sealed for follower in followers):
        if stop.is_set():
            return "stopped"
        if time.monotonic() > late:
            return "late"
        came = [follower.advance() for follower in followers]
        if any(came):
            pause = _SHORTEST
        # Nothing announces a counter in memory, so it is read again after a pause (decision 14).
        elif not all(follower.sealed for follower in followers):
            stop.wait(pause)
            reads = any(follower.seen is not None for follower in followers)
            pause = min(2 * pause, _LONGEST if reads else _NOT_THERE)
    return "sealed"
