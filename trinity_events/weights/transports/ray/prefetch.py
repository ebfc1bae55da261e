"""Verifying a part while its objects are still being put.

Those on another node come to this one meanwhile. As with shared memory nothing is promised of what
was read along: objects never change, but which of them the part is made of is known at its end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...tensors import address, digest
from ..base import Ended, PartRef, Take, Taker
from .directory import DEADLINE, NONE, PartInProgress, PutAttempt, directory_of

_ASKED = 1.0
"""Seconds after which the directory answers, whether or not there is anything new."""
_LOOK = 5e-3
"""The longest between two looks whether to stop."""
_SHORTEST, _LONGEST = 20e-3, 0.5
"""Seconds between two looks for a publisher that is not there: the whole cluster asks one place."""


class Fetched(NamedTuple):
    """An object that is here, and what was digested of it."""

    data: memoryview
    chunk_bytes: int
    digests: list[str]
    """Of its chunks, all of ``chunk_bytes`` but the last."""

    def chunks(self) -> Iterator[memoryview]:
        """Its chunks, as they were put."""
        for begin in range(0, len(self.data), self.chunk_bytes):
            yield self.data[begin : begin + self.chunk_bytes]

    def digest_of(self, chunk: memoryview) -> str | None:
        """Of some of its bytes, if just those were digested."""
        index, behind = divmod(address(chunk) - address(self.data), self.chunk_bytes)
        digested = min(self.chunk_bytes, len(self.data) - index * self.chunk_bytes)
        there = not behind and len(chunk) == digested and index < len(self.digests)
        return self.digests[index] if there else None


class RayPartPrefetch:
    """Reads one part along with its publisher.

    Args:
        ray: Ray.
        part: The part.
        taker: Who else is given what was digested.
    """

    def __init__(self, ray: Any, part: PartRef, taker: Taker | None = None) -> None:
        self.part = part
        self.fetched: dict[Any, Fetched] = {}
        """Objects of the attempt that is followed, by their references, from the first on."""
        self._ray = ray
        self._taker = taker
        self._take: Take | None = None
        self._directory: Any = None
        self._asked: Any = None
        """What it has not answered yet."""
        self._pause, self._again = _SHORTEST, 0.0
        self._forget(NONE)

    @property
    def sealed(self) -> bool:
        """Whether all of it was seen that there will be."""
        return self._all_told and not self._coming

    def waits_for(self) -> list[Any]:
        """The directory's answer, and objects, wherever they are; nothing when nobody is there."""
        if self._asked is None and not self._all_told and time.monotonic() >= self._again:
            self._ask()
        asked = [] if self._asked is None else [self._asked]
        return asked + [one for one in self._coming if one not in self._here]

    def advance(self, there: Collection[Any]) -> None:
        """Take what is there of what it waits for."""
        try:
            if self._asked in there:
                asked, self._asked = self._asked, None
                self._hear(self._ray.get(asked, timeout=DEADLINE))
            self._here.update(one for one in self._coming if one in there)
            while self._coming and self._coming[0] in self._here:
                reference = self._coming.popleft()
                self._here.remove(reference)
                self._digest(reference)
        except self._ray.exceptions.RayError:  # its publisher ended, or a node of theirs
            self._forget(NONE)
            self._is_gone()

    def _is_gone(self) -> None:
        """Nobody publishes the part: look again in a while."""
        self._directory = self._asked = None
        self._again = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LONGEST)

    def _ask(self) -> None:
        try:
            if self._directory is None:
                self._directory = directory_of(self._ray, self.part)
            follow = self._directory.follow.remote
            self._asked = follow(self.part, self._attempt, self._told_of, _ASKED)
        except (ValueError, self._ray.exceptions.RayError):
            self._is_gone()

    def _hear(self, told: PartInProgress) -> None:
        if told.attempt != self._attempt:
            self._forget(told.attempt)
            if self._taker is not None and told.attempt != NONE:
                self._take = self._taker(self.part)
        self._all_told, self._pause = told.sealed, _SHORTEST
        self._told_of += len(told.objects.references)
        self._coming.extend(told.objects.references)

    def _forget(self, attempt: PutAttempt) -> None:
        """What came is of an attempt that was given up; another one begins, or none."""
        self._attempt, self._all_told, self._told_of = attempt, False, 0
        self._coming: deque[Any] = deque()
        """Objects that are not digested yet."""
        self._here: set[Any] = set()
        """Those of them that are on this node."""
        self.fetched, self._take, self._taken = {}, None, 0

    def _digest(self, reference: Any) -> None:
        data = as_bytes(self._ray.get(reference, timeout=DEADLINE))
        if data is None:
            self._take = None  # and whoever pulls it will say what is wrong with it
            return
        fetched = self.fetched[reference] = Fetched(data, self._attempt.chunk_bytes, [])
        for chunk in fetched.chunks():
            digested = digest(chunk)
            if self._take is not None:
                self._take(self._taken, chunk)
            fetched.digests.append(digested)  # behind it: what counts as digested was taken
            self._taken += 1


def as_bytes(found: Any) -> memoryview | None:
    """What was got from Ray, for reading; None when it is anything but an array of bytes."""
    if not (isinstance(found, np.ndarray) and found.dtype == np.uint8 and found.ndim == 1):
        return None
    return found.data.toreadonly()


def prefetch(
    ray: Any, followers: Sequence[RayPartPrefetch], stop: threading.Event, deadline: float
) -> Ended:
    """Advance all of them until each is sealed, or for ``deadline`` seconds."""
    late = time.monotonic() + deadline
    while not all(follower.sealed for follower in followers):
        if stop.is_set():
            return "stopped"
        if time.monotonic() > late:
            return "late"
        waited_for = [one for follower in followers for one in follower.waits_for()]
        if not waited_for:
            stop.wait(_SHORTEST)
            continue
        there, _ = ray.wait(waited_for, num_returns=1, timeout=_LOOK)
        for follower in followers:
            follower.advance(there)
    return "sealed"
