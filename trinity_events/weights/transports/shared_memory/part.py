"""Layout of a part in a segment of shared memory, and the reader of a sealed part."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Container, Sequence
from pathlib import Path
from typing import NamedTuple

from trinity_schemas.codec import MAX_MANIFEST_BYTES

from ....errors import CorruptVersion
from ....system.file_locks import try_lock
from ....system.shared_memory import end_beside
from ..base import Check, PartRef

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
            raise CorruptVersion(f"the segment of the {part} is too short")
        magic, data, manifest = HEADER.unpack_from(memory)
        if magic != MAGIC or manifest > MAX_MANIFEST_BYTES:
            raise CorruptVersion(f"the segment of the {part} has no valid header")
        if DATA + data + manifest > len(memory):
            raise CorruptVersion(f"the segment of the {part} is shorter than its header says")
        self._data = memory[DATA : DATA + data]
        self.manifest = bytes(memory[DATA + data : DATA + data + manifest])
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
                check(index, data, self._digest_of(index, offset, size))
            offset += size
        return [self._data]

    def _digest_of(self, index: int, offset: int, size: int) -> str | None:
        """Return the chunk's digest if it was computed during the write."""
        seen = self._seen
        if seen is None or index >= len(seen.digests):
            return None
        there = (offset, size) == (index * seen.chunk_bytes, seen.chunk_bytes)
        return seen.digests[index] if there else None

    def close(self) -> None:
        """End the lease."""
        if self._descriptor >= 0:
            let_go(self._descriptor)
            self._descriptor = -1


class Mapping:
    """Mapping of a segment into this process, read-only."""

    def __init__(self, descriptor: int, size: int) -> None:
        if size == 0:
            raise CorruptVersion("a segment of weights is empty")
        self.memory = memoryview(mmap.mmap(descriptor, size, flags=_POPULATED, prot=mmap.PROT_READ))
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
    if not try_lock(descriptor, fcntl.LOCK_SH):
        return False  # it is being rewritten
    return path.stat().st_ino == os.fstat(descriptor).st_ino


def let_go(descriptor: int) -> None:
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
