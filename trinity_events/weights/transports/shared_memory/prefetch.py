"""Verification of a part while it is still being written.

The writer stores in the segment's header how many bytes are final. A prefetching reader digests
them, under a lease that prevents a rewrite of the segment. It compares no digest yet: the announced
manifest exists only at the end. Digests of an abandoned part are dropped.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from ....system.file_locks import try_lock
from ....system.shared_memory import read_beside
from ...tensors import digest
from ..base import Ended, PartRef, Take, Taker
from .part import (
    DATA,
    FILLED,
    FILLED_AT,
    WRITING,
    WRITING_AT,
    WriteDigests,
    file_name,
    let_go,
    name_while_written,
)

_AT_ONCE = 16
"""Maximum chunks digested for one part before the next part has its turn."""
_SHORTEST, _LONGEST = 50e-6, 2e-3
"""Seconds between two reads of the counters, doubled while no bytes arrive."""
_NOT_THERE = 20e-3
"""Maximum seconds between two searches for parts that may not be on this host."""


class PartPrefetch:
    """Prefetch of one part while it is written."""

    def __init__(
        self,
        part: PartRef,
        find: Callable[[str], list[Path]],
        mapped: Callable[[int], memoryview],
        taker: Taker | None = None,
    ) -> None:
        self.part = part
        self.sealed = False
        self.seen: WriteDigests | None = None
        self._find = find
        self._mapped = mapped
        self._taker = taker
        self._take: Take | None = None
        self._descriptor = -1
        self._given_up: bytes | None = None
        """Generation of an abandoned write, which is not read again."""

    def advance(self) -> bool:
        """Digest some new chunks; return True if there were any."""
        if self.sealed or (self._descriptor < 0 and not self._open()):
            return False
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
            let_go(self._descriptor)
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
                            if self._taker is not None:
                                self._take = self._taker(self.part)
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
        (filled,) = FILLED.unpack_from(memory, FILLED_AT)
        end = min(filled // size, len(digests) + _AT_ONCE) if size else 0
        if end == len(digests) or DATA + end * size > len(memory):
            return False
        for begin in range(DATA + len(digests) * size, DATA + end * size, size):
            chunk = memory[begin : begin + size]
            digested = digest(chunk)
            if self._take is not None:
                self._take(len(digests), chunk)
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
        elif not all(follower.sealed for follower in followers):
            stop.wait(pause)
            reads = any(follower.seen is not None for follower in followers)
            pause = min(2 * pause, _LONGEST if reads else _NOT_THERE)
    return "sealed"
