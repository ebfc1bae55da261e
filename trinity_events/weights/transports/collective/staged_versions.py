"""Versions that an explorer received through the group and has not installed yet."""

from __future__ import annotations

import mmap
import threading

import torch

from ...tensors import as_buffer
from ..base import PartRef

_LEAST = 1 << 20  # bytes; an empty mapping is an error


class Buffer:
    """Reusable memory that grows as bytes arrive."""

    def __init__(self, nbytes: int = 0) -> None:
        self._memory = _map(max(nbytes, _LEAST))
        self.filled = 0
        self.manifest = b""
        self.holders = 0
        self.was_read = False

    def clear(self) -> None:
        """Drop the content; the mapped memory stays."""
        self.filled, self.manifest, self.was_read = 0, b"", False

    def extend(self, nbytes: int) -> torch.Tensor:
        """Return uint8 [nbytes] behind the present bytes, and grow if needed."""
        end = self.filled + nbytes
        if end > len(self._memory):
            # Doubled, because the size is known only at the end; untouched pages cost nothing.
            self._grow(max(end, 2 * len(self._memory)))
        room = as_buffer(memoryview(self._memory)[self.filled : end])
        self.filled = end
        return room

    def _grow(self, nbytes: int) -> None:
        try:
            self._memory.resize(nbytes)  # the pages are moved, never copied
        # a reader has a view of it, or this is not Linux
        except (BufferError, OSError, SystemError):
            grown = _map(nbytes)
            grown[: self.filled] = self._memory[: self.filled]
            self._memory = grown

    @property
    def data(self) -> memoryview:
        """Return the received bytes, read-only."""
        # Readers share it: none may change what the others verify.
        return memoryview(self._memory)[: self.filled].toreadonly()


def _map(nbytes: int) -> mmap.mmap:
    """Map memory that takes no pages before it is written."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class StagedVersions:
    """Buffers of the newest complete version, the arriving one, and those being read.

    Once the newest version was read, its buffer is reused for the arriving one: the model has it
    then. So an explorer that keeps up needs one version beside its model, and a slower one needs
    two. It needs one more while it installs one version and two others arrive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[Buffer] = []
        self._newest: tuple[PartRef, Buffer] | None = None
        self._last_size = 0

    def begin(self) -> Buffer:
        """Return a buffer without readers whose version is no longer needed."""
        with self._lock:
            newest = None if self._newest is None else self._newest[1]
            if self._spare:
                buffer = self._spare.pop()
            elif newest is not None and newest.was_read and not newest.holders:
                buffer, self._newest = newest, None
            else:
                buffer = Buffer(self._last_size)
        buffer.clear()
        return buffer

    def complete(self, part: PartRef, buffer: Buffer) -> None:
        """Mark the buffer as complete and newest."""
        with self._lock:
            before, self._newest = self._newest, (part, buffer)
            self._last_size = buffer.filled
            if before is not None and not before[1].holders:
                self._reuse(before[1])

    def abandon(self, buffer: Buffer) -> None:
        """Release a buffer that will not be complete."""
        with self._lock:
            self._reuse(buffer)

    def hold(self, part: PartRef) -> Buffer | None:
        """Return the buffer of a part and protect it until :meth:`release`."""
        with self._lock:
            if self._newest is None or self._newest[0] != part:
                return None
            self._newest[1].holders += 1
            return self._newest[1]

    def release(self, buffer: Buffer) -> None:
        """Release one reader's hold of a buffer."""
        with self._lock:
            buffer.holders -= 1
            # From now on the model has the version, so that the next one may take the memory.
            buffer.was_read = True
            current = self._newest is not None and self._newest[1] is buffer
            if not buffer.holders and not current:
                self._reuse(buffer)

    def forget(self, part: PartRef) -> None:
        """Release a part that is no longer wanted."""
        with self._lock:
            if self._newest is not None and self._newest[0] == part:
                buffer = self._newest[1]
                self._newest = None
                if not buffer.holders:
                    self._reuse(buffer)

    def newest(self) -> PartRef | None:
        """Return the newest part here, or None."""
        with self._lock:
            return None if self._newest is None else self._newest[0]

    def _reuse(self, buffer: Buffer) -> None:
        # One spare is enough: only one buffer is written between two versions.
        self._spare = [buffer]
