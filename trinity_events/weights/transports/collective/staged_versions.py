"""Where an explorer keeps what came through the group, until it is installed."""

from __future__ import annotations

import mmap
import threading

import torch

from ...tensors import as_buffer
from ..base import PartRef

_LEAST = 1 << 20


class Buffer:
    """Memory that grows as bytes come, and is used again.

    Args:
        nbytes: How many may come.
    """

    def __init__(self, nbytes: int = 0) -> None:
        self._memory = _mapped(max(nbytes, _LEAST))
        self.filled = 0
        self.manifest = b""
        self.holders = 0
        self.was_read = False

    def clear(self) -> None:
        """Begin anew; what is mapped stays."""
        self.filled, self.manifest, self.was_read = 0, b"", False

    def extend(self, nbytes: int) -> torch.Tensor:
        """Room for so many bytes behind those that are there: uint8 [nbytes]."""
        end = self.filled + nbytes
        if end > len(self._memory):
            self._grow(max(end, 2 * len(self._memory)))
        room = as_buffer(memoryview(self._memory)[self.filled : end])
        self.filled = end
        return room

    def _grow(self, nbytes: int) -> None:
        try:
            self._memory.resize(nbytes)  # its pages move: they are never there twice
        except (BufferError, OSError, SystemError):  # somebody looks at it, or this is no Linux
            grown = _mapped(nbytes)
            grown[: self.filled] = self._memory[: self.filled]
            self._memory = grown

    @property
    def data(self) -> memoryview:
        """What is there, for reading."""
        return memoryview(self._memory)[: self.filled].toreadonly()


def _mapped(nbytes: int) -> mmap.mmap:
    """Memory that takes nothing before it is written to."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class StagedVersions:
    """The newest whole version, the one that comes, and those that are still being read.

    The newest makes way for the one that comes once it was read, since a model has it then. So an
    explorer that keeps up has room for one version beside its model; one that falls behind for two,
    and for one more while it installs one and two others come.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: list[Buffer] = []
        self._newest: tuple[PartRef, Buffer] | None = None
        self._last_size = 0

    def begin(self) -> Buffer:
        """A buffer that nobody reads, and that has nothing that somebody may still come for."""
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

    def keep(self, part: PartRef, buffer: Buffer) -> None:
        """The buffer is whole, and the newest now."""
        with self._lock:
            before, self._newest = self._newest, (part, buffer)
            self._last_size = buffer.filled
            if before is not None and not before[1].holders:
                self._put_back(before[1])

    def give_up(self, buffer: Buffer) -> None:
        """The buffer will not be whole."""
        with self._lock:
            self._put_back(buffer)

    def hold(self, part: PartRef) -> Buffer | None:
        """The part, which stays as it is until :meth:`let_go`."""
        with self._lock:
            if self._newest is None or self._newest[0] != part:
                return None
            self._newest[1].holders += 1
            return self._newest[1]

    def let_go(self, buffer: Buffer) -> None:
        """One reader less."""
        with self._lock:
            buffer.holders -= 1
            buffer.was_read = True
            current = self._newest is not None and self._newest[1] is buffer
            if not buffer.holders and not current:
                self._put_back(buffer)

    def forget(self, part: PartRef) -> None:
        """The part is not wanted any more."""
        with self._lock:
            if self._newest is not None and self._newest[0] == part:
                buffer = self._newest[1]
                self._newest = None
                if not buffer.holders:
                    self._put_back(buffer)

    def newest(self) -> PartRef | None:
        """Which part is here."""
        with self._lock:
            return None if self._newest is None else self._newest[0]

    def _put_back(self, buffer: Buffer) -> None:
        # One is enough: between two versions only one is written.
        self._spare = [buffer]
