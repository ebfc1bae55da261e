"""How a part lies in a segment of shared memory, and reading one that is whole."""

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
from ..base import Check, PartRef
from .segments import end_beside, locked

DATA = 4096
"""Where the bytes begin, behind a page for the header."""
MAGIC = b"trinity1"
HEADER = struct.Struct("<8sQQ")
"""Of a part that is whole: magic, bytes of data, bytes of the manifest behind them."""
WRITING = struct.Struct("<8sQ")
"""What is being written: its generation, never the same twice; bytes of a chunk."""
WRITING_AT = 64
FILLED = struct.Struct("<Q")
"""How many bytes will not change any more."""
FILLED_AT = WRITING_AT + WRITING.size
_POPULATED = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)


class WriteDigests(NamedTuple):
    """What was digested of a part while it was written."""

    generation: bytes
    chunk_bytes: int
    digests: list[str]
    """Of its first chunks, all of ``chunk_bytes``."""


class SharedMemorySource:
    """Implements :class:`~trinity_events.weights.PartSource`: the bytes where they lie.

    While it is open nothing is written to the segment.

    Args:
        part: Which part it is.
        descriptor: Of the segment, locked for reading; closed at the end.
        memory: The segment's.
        seen: What was digested of it before; of no use when it was of another generation.
    """

    def __init__(
        self, part: PartRef, descriptor: int, memory: memoryview, seen: WriteDigests | None = None
    ) -> None:
        self._descriptor = descriptor
        if len(memory) < DATA:
            raise CorruptVersion(f"the segment of the {part} is too short to be one")
        magic, data, manifest = HEADER.unpack_from(memory)
        if magic != MAGIC or manifest > MAX_MANIFEST_BYTES:
            raise CorruptVersion(f"the segment of the {part} has no header that can be used")
        if DATA + data + manifest > len(memory):
            raise CorruptVersion(f"the segment of the {part} is shorter than its header says")
        self._data = memory[DATA : DATA + data]
        self.manifest = bytes(memory[DATA + data : DATA + data + manifest])
        generation, _ = WRITING.unpack_from(memory, WRITING_AT)
        self._seen = seen if seen is not None and seen.generation == generation else None

    @property
    def data(self) -> memoryview:
        """All bytes of the part, whether or not they are what was published."""
        return self._data

    def read(
        self, sizes: Sequence[int], check: Check, wanted: Container[int] | None = None
    ) -> Sequence[memoryview]:
        """The bytes in the segment itself; nothing is copied."""
        offset = 0
        for index, size in enumerate(sizes):
            if wanted is None or index in wanted:
                data = self._data[offset : offset + size]
                check(index, data, self._digest_of(index, offset, size))
            offset += size
        return [self._data]

    def _digest_of(self, index: int, offset: int, size: int) -> str | None:
        """The chunk's digest, when it was taken before."""
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


def leased(descriptor: int, path: Path) -> bool:
    """Lock a segment for reading, if it still is what its name said when it was opened."""
    if not locked(descriptor, fcntl.LOCK_SH):
        return False  # it is being written again
    return path.stat().st_ino == os.fstat(descriptor).st_ino


def let_go(descriptor: int) -> None:
    """End all leases on a segment, and close it."""
    # Unlocked before it is closed, since a mapping has descriptors of the same locks.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    end_beside(descriptor)
    os.close(descriptor)


def file_name(part: PartRef) -> str:
    """Of a part that is whole."""
    return "~".join(map(str, part))


def name_while_written(part: PartRef) -> str:
    """Of a part that is not whole yet."""
    return f"{file_name(part)}~writing"
