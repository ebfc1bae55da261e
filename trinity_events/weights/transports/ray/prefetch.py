"""Verification of a part while its objects are still being put.

Objects on another node are fetched to this one at the same time. As with shared memory, the result
promises nothing. Objects never change, but the set of a part's objects is known only at its end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...tensors import address, digest
from ..base import Ended, OnChunk, OnPart, PartRef
from .directory import DEADLINE, NONE, PartInProgress, PutAttempt, find_directory

_ASKED = 1.0
"""Seconds after which the directory replies, even without a new object."""
_LOOK = 5e-3
"""Maximum seconds between two checks of the stop event."""
_SHORTEST, _LONGEST = 20e-3, 0.5
"""Seconds between two lookups of a missing publisher; the whole cluster shares one key-value store.
"""


class Fetched(NamedTuple):
    """Object on this node, and the digests of its chunks."""

    data: memoryview
    chunk_bytes: int
    digests: list[str]
    """Digests of its chunks, all of ``chunk_bytes`` but the last."""

    def chunks(self) -> Iterator[memoryview]:
        """Yield its chunks, in the publisher's sizes."""
        for begin in range(0, len(self.data), self.chunk_bytes):
            yield self.data[begin : begin + self.chunk_bytes]

    def find_digest(self, chunk: memoryview) -> str | None:
        """Return the digest of a chunk, if exactly these bytes were digested."""
        index, behind = divmod(address(chunk) - address(self.data), self.chunk_bytes)
        digested = min(self.chunk_bytes, len(self.data) - index * self.chunk_bytes)
        there = not behind and len(chunk) == digested and index < len(self.digests)
        return self.digests[index] if there else None


class RayPartPrefetch:
    """Prefetch of one part while it is published."""

    def __init__(self, ray: Any, part: PartRef, on_part: OnPart | None = None) -> None:
        self.part = part
        self.fetched: dict[Any, Fetched] = {}
        """Objects of the current attempt by reference, from the first on."""
        self._ray = ray
        self._on_part = on_part
        self._on_chunk: OnChunk | None = None
        self._directory: Any = None
        self._call: Any = None
        """Pending call of the directory."""
        self._pause, self._again = _SHORTEST, 0.0
        self._forget(NONE)

    @property
    def sealed(self) -> bool:
        """Return True if the part is sealed and all its objects are digested."""
        return self._all_listed and not self._coming

    def waits_for(self) -> list[Any]:
        """Return the references to wait for; none if there is no publisher."""
        if self._call is None and not self._all_listed and time.monotonic() >= self._again:
            self._request()
        calls = [] if self._call is None else [self._call]
        return calls + [reference for reference in self._coming if reference not in self._here]

    def advance(self, there: Collection[Any]) -> None:
        """Process the awaited references that have arrived."""
        try:
            if self._call in there:
                call, self._call = self._call, None
                self._process_reply(self._ray.get(call, timeout=DEADLINE))
            self._here.update(reference for reference in self._coming if reference in there)
            # In order, because chunks are handed to the callback in order.
            while self._coming and self._coming[0] in self._here:
                reference = self._coming.popleft()
                self._here.remove(reference)
                self._digest(reference)
        except self._ray.exceptions.RayError:  # its publisher or a node has ended
            self._forget(NONE)
            self._is_gone()

    def _is_gone(self) -> None:
        """Schedule another lookup, since no publisher has the part."""
        self._directory = self._call = None
        self._again = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST)

    def _request(self) -> None:
        try:
            if self._directory is None:
                self._directory = find_directory(self._ray, self.part)
            follow = self._directory.follow.remote
            self._call = follow(self.part, self._attempt, self._listed_count, _ASKED)
        except (ValueError, self._ray.exceptions.RayError):
            self._is_gone()

    def _process_reply(self, progress: PartInProgress) -> None:
        if progress.attempt != self._attempt:
            self._forget(progress.attempt)
            if self._on_part is not None and progress.attempt != NONE:
                self._on_chunk = self._on_part(self.part)
        self._all_listed, self._pause = progress.sealed, _SHORTEST
        self._listed_count += len(progress.objects.references)
        self._coming.extend(progress.objects.references)

    def _forget(self, attempt: PutAttempt) -> None:
        """Drop the objects of an abandoned attempt, and follow ``attempt``."""
        self._attempt, self._all_listed, self._listed_count = attempt, False, 0
        self._coming: deque[Any] = deque()
        """Objects that are not digested yet."""
        self._here: set[Any] = set()
        """Undigested objects that are on this node."""
        self.fetched, self._on_chunk, self._next_chunk = {}, None, 0

    def _digest(self, reference: Any) -> None:
        data = as_bytes(self._ray.get(reference, timeout=DEADLINE))
        if data is None:
            self._on_chunk = None  # the pull reports the error
            return
        fetched = self.fetched[reference] = Fetched(data, self._attempt.chunk_bytes, [])
        for chunk in fetched.chunks():
            digested = digest(chunk)
            if self._on_chunk is not None:
                self._on_chunk(self._next_chunk, chunk)
            fetched.digests.append(digested)  # appended last: a digested chunk was always taken
            self._next_chunk += 1


def as_bytes(value: Any) -> memoryview | None:
    """Return an object from Ray as read-only bytes, or None if it is not an array of bytes."""
    if not (isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1):
        return None
    return value.data.toreadonly()


def prefetch(
    ray: Any, followers: Sequence[RayPartPrefetch], stop: threading.Event, deadline: float
) -> Ended:
    """Advance all prefetches until each part is sealed, or ``deadline`` seconds passed."""
    late = time.monotonic() + deadline
    while not all(follower.sealed for follower in followers):
        if stop.is_set():
            return "stopped"
        if time.monotonic() > late:
            return "late"
        waited_for = [reference for follower in followers for reference in follower.waits_for()]
        if not waited_for:
            stop.wait(_SHORTEST)
            continue
        # A wait of Ray cannot be interrupted, so it is short for the stop event's sake.
        there, _ = ray.wait(waited_for, num_returns=1, timeout=_LOOK)
        for follower in followers:
            follower.advance(there)
    return "sealed"
