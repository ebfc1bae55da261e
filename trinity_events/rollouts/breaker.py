"""Circuit breaker: pauses the dispatch while what answers depend on always fails. No I/O.

A dependency is what explorers ask to answer a request: a reward service, a judge, an environment, a
sandbox. Only explorers reach it, so requests themselves probe it.

1. A failure of a dependency spends no attempt while it may be one of every request. It spends one
   as soon as another request is answered and the circuit did not open in between.
2. The circuit opens after :data:`FAILURES_IN_A_ROW` failures without an answer between them. They
   are of two prompts at least, unless nothing answered at all: one prompt may be at fault.
3. It opens only after an answer of this epoch. A dependency that has never worked is not away but
   set up wrongly, for which a run is not to wait.
4. While it is open, one request at a time probes it, at growing intervals. An answer closes it.
"""

from __future__ import annotations

import logging
from dataclasses import field
from typing import NamedTuple

from msgspec import Struct

from ..errors import DeadlineExceeded

FAILURES_IN_A_ROW = 3
"""Failures without an answer that open the circuit: a restart of a service cuts off one or two."""
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
"""Seconds from a probe to the next one, which double: each costs the generation of one group."""

logger = logging.getLogger(__name__)


class DependencyAway(DeadlineExceeded):
    """A dependency failed for every request for longer than a run waits for one.

    Attributes:
        run_id: The run.
        dependency: Name of the dependency, with its URL if it has one.
    """

    run_id: str = field(kw_only=True)
    dependency: str = field(kw_only=True)
    text = (
        "run {run_id}: {dependency} failed for every request within {deadline:g} s ({reason}): no "
        "prompt was dropped for it, so mend it, and start the run again: it resumes"
    )


class Outage(NamedTuple):
    """Time in which a dependency fails for every request."""

    dependency: str
    reason: str
    """Reason of the failure that opened the circuit."""
    began: float
    """Time of the clock that callers pass."""

    def format(self) -> str:
        """Return the object of the wait for its end."""
        return f"{self.dependency}, which fails for every request ({self.reason})"


class Suspect(Struct, frozen=True):
    """Failed request of which it is not known yet if others fail as well."""

    ordinal: int
    explorer: str
    reason: str
    openings: int
    """Times that the circuit had opened before."""


class CircuitBreaker:
    """Circuit of one epoch, which the dispatchers of training and of evaluations share."""

    def __init__(self) -> None:
        self.outage: Outage | None = None
        """Outage that is under way; None while the circuit is closed."""
        self.openings = 0
        self._has_answered = False
        self._failed: list[str] = []
        """Prompts of the failures since the last answer."""
        self._next_probe = 0.0
        self._pause = _FIRST_PAUSE

    @property
    def has_answered(self) -> bool:
        """True once a request of this epoch was answered."""
        return self._has_answered

    def add_answer(self) -> Outage | None:
        """Note an answer; return the outage that it ends, if one was under way."""
        self._has_answered = True
        self._failed.clear()
        ended, self.outage = self.outage, None
        return ended

    def add_failure(
        self, prompt: str, dependency: str, reason: str, *, unreachable: bool, now: float
    ) -> bool:
        """Note a failure; return True if it opens the circuit.

        Args:
            prompt: Name of the prompt among those of all dispatchers.
            dependency: Name of what failed.
            reason: Reason in words.
            unreachable: True if nothing answered, which is no fault of the prompt.
            now: Time of a clock that is never set.
        """
        if self.outage is not None:
            return False
        # Bounded: beyond the number that opens the circuit only their difference counts.
        self._failed = [*self._failed[-FAILURES_IN_A_ROW:], prompt]
        is_of_several = unreachable or len({*self._failed}) > 1
        if not self._has_answered or len(self._failed) < FAILURES_IN_A_ROW or not is_of_several:
            return False
        self.outage = Outage(dependency, reason, now)
        self.openings += 1
        self._pause = _FIRST_PAUSE
        self.start_probe(now)
        return True

    def is_probe_due(self, now: float) -> bool:
        """Return True if the next request may go out."""
        return self.outage is None or now >= self._next_probe

    def start_probe(self, now: float) -> None:
        """Note that a request goes out while the circuit is open."""
        self._next_probe = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


class DependencyFailures:
    """Failures of dependencies as one dispatcher counts them.

    Args:
        breaker: Circuit, which others may share.
        name: Name of the dispatcher among those that share it.
    """

    def __init__(self, breaker: CircuitBreaker, name: str) -> None:
        self._breaker = breaker
        self._name = name
        self._suspects: dict[int, Suspect] = {}
        self._probe: int | None = None
        """Ordinal of the request that probes the dependency."""

    @property
    def outage(self) -> Outage | None:
        """Outage that is under way."""
        return self._breaker.outage

    def add_failure(
        self,
        suspect: Suspect,
        dependency: str,
        *,
        unreachable: bool,
        is_alone: bool,
        now: float,
    ) -> list[Suspect]:
        """Note a failed request; return those whose attempt is spent.

        Args:
            suspect: The request.
            dependency: Name of what failed.
            unreachable: True if nothing answered.
            is_alone: True if no other request is open whose answer could tell.
            now: Time of a clock that is never set.
        """
        opened = self._breaker.add_failure(
            f"{self._name}/{suspect.ordinal}",
            dependency,
            suspect.reason,
            unreachable=unreachable,
            now=now,
        )
        if opened:
            logger.warning(
                "the dispatch pauses: %s fails for every request (%s); no attempt is spent, and it "
                "continues once a request is answered",
                *(dependency, suspect.reason),
            )
        if self.outage is not None:
            self._suspects.clear()
            return []
        if not self._breaker.has_answered or (is_alone and not unreachable):
            return [suspect]
        self._suspects[suspect.ordinal] = suspect
        return []

    def add_answer(self, now: float) -> list[Suspect]:
        """Note an answer; return the requests whose attempt is spent: their failure was their own.

        An answer that ends an outage spends none.
        """
        if (ended := self._breaker.add_answer()) is not None:
            logger.warning(
                "the dispatch continues: %s answers again, after %.0f s",
                *(ended.dependency, now - ended.began),
            )
        # Another dispatcher may have seen the outage that these belong to.
        spent = [
            suspect
            for suspect in self._suspects.values()
            if suspect.openings == self._breaker.openings
        ]
        self._suspects.clear()
        return spent

    def make_suspect(self, ordinal: int, explorer: str, reason: str) -> Suspect:
        """Return a failed request at the present state of the circuit."""
        return Suspect(ordinal, explorer, reason, self._breaker.openings)

    def admit(self, count: int, is_waiting: bool, now: float) -> int:
        """Return how many of ``count`` requests may go out now.

        Args:
            count: Requests that are to go out.
            is_waiting: True if the request that probes is not answered yet.
            now: Time of a clock that is never set.
        """
        if self.outage is None:
            return count
        return min(count, int(not is_waiting and self._breaker.is_probe_due(now)))

    @property
    def probe(self) -> int | None:
        """Ordinal of the last request that probed; None before one."""
        return self._probe

    def start_probe(self, ordinal: int, now: float) -> None:
        """Note the request that goes out while the circuit is open."""
        self._probe = ordinal
        self._breaker.start_probe(now)
