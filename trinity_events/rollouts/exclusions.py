"""Explorers whose answers are not taken: several were malformed, or its requests fail. No I/O.

1. An explorer is excluded after :data:`MALFORMED_ANSWERS` malformed answers in an epoch, or after a
   number of failed requests in a row while another explorer answers.
2. Requests in a row whose reward failed end the run. They do not if all of them are of one explorer
   that is excluded for it.
3. State is bounded: explorers choose their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from trinity_schemas import ExplorerExcluded

from ..core.handlers.rollouts import format_exclusion
from ..errors import DeadlineExceeded

MALFORMED_ANSWERS = 3
"""Malformed answers of an explorer in an epoch that exclude it. One may come of a passing fault of
its host; each costs the run the work of one request."""
_KEPT_NAMES = 1024
"""Explorers whose malformed answers are counted. Names are the explorers' own, so that one of them
could fill the memory with them; the name that was counted first is forgotten first."""
_NAMED = 4
"""Excluded explorers that an error names."""


class ExplorersExcluded(DeadlineExceeded):
    """Groups are missing at a deadline in a run of which explorers are excluded.

    Attributes:
        run_id: The run.
        exclusions: Exclusions of the explorers, in their order.
    """

    run_id: str = field(kw_only=True)
    exclusions: tuple[ExplorerExcluded, ...] = field(kw_only=True)
    text = (
        f"{DeadlineExceeded.text}; {{_named}}: start other explorers, or mend these and resume the "
        "run"
    )

    @property
    def explorers(self) -> tuple[str, ...]:
        """Names of the excluded explorers."""
        return tuple(exclusion.explorer for exclusion in self.exclusions)

    @property
    def _named(self) -> str:
        named = "; ".join(
            format_exclusion(exclusion.explorer, exclusion)
            for exclusion in self.exclusions[:_NAMED]
        )
        unnamed = len(self.exclusions) - _NAMED
        return f"{named}; {unnamed} further explorers are excluded" if unnamed > 0 else named


class Exclusions:
    """Malformed answers of each explorer of an epoch, and the explorers that are excluded.

    The dispatchers of training and of evaluations share one. An explorer names itself in its
    answers: one that takes the name of another can have that one excluded.
    """

    def __init__(self) -> None:
        self._malformed: dict[str, int] = {}
        self._excluded: dict[str, ExplorerExcluded] = {}
        self.unpublished: list[ExplorerExcluded] = []
        """Exclusions that are not in the log yet."""
        self._published = 0
        """Exclusions that are, or will be, in the log: more names are invented ones."""

    def add_malformed(self, explorer: str, reason: str) -> ExplorerExcluded | None:
        """Count a malformed answer; return the exclusion of its explorer if it follows from it."""
        if explorer in self:
            return None
        # Removed and added again, so that the name moves to the end and is forgotten last.
        count = self._malformed.pop(explorer, 0) + 1
        self._malformed[explorer] = count
        _drop_first(self._malformed)
        if count < MALFORMED_ANSWERS:
            return None
        del self._malformed[explorer]
        return self.add(ExplorerExcluded(explorer=explorer, malformed=count, reason=reason))

    def add(self, excluded: ExplorerExcluded) -> ExplorerExcluded:
        """Exclude an explorer, and return its exclusion."""
        self._excluded[excluded.explorer] = excluded
        _drop_first(self._excluded)
        # Bounded: an explorer that invents names would fill the log with exclusions.
        if self._published < _KEPT_NAMES:
            self._published += 1
            self.unpublished.append(excluded)
        return excluded

    @property
    def names(self) -> Sequence[str]:
        """Names of the excluded explorers, in the order of their exclusions."""
        return tuple(self._excluded)

    @property
    def all(self) -> Sequence[ExplorerExcluded]:
        """All exclusions, in their order."""
        return tuple(self._excluded.values())

    def __contains__(self, explorer: object) -> bool:
        """Return True if an explorer is excluded."""
        return explorer in self._excluded


class FailureStreaks:
    """Failed requests in a row: of each explorer, and of the run those whose reward failed.

    Args:
        exclusions: Excluded explorers of the epoch.
        limit: Failed requests in a row that exclude an explorer, or end the run.
    """

    def __init__(self, exclusions: Exclusions, limit: int) -> None:
        self._exclusions = exclusions
        self._limit = limit
        self._failures: dict[str, int] = {}
        """Failed requests of each explorer since its last answer; 0 for one that answered last."""
        self._rewards_failed: list[str] = []
        """Explorer of each request whose reward failed since the last answer of any explorer."""

    def add_answer(self, explorer: str) -> None:
        """Note a sound answer of an explorer, with at least one reward."""
        self._rewards_failed.clear()
        self._set(explorer, 0)

    def add_failure(
        self, explorer: str, reason: str, *, of_reward: bool
    ) -> ExplorerExcluded | None:
        """Count a failed request; return the exclusion of its explorer if it follows from it."""
        self._rewards_failed += [explorer] * of_reward
        if not explorer:  # of a client that does not name itself, and that could not be excluded
            return None
        failures = self._failures.get(explorer, 0) + 1
        self._set(explorer, failures)
        # If all explorers fail, the task or the reward is at fault, and an exclusion would hide it.
        if failures < self._limit or not self._others_answer(explorer):
            return None
        del self._failures[explorer]
        # Invariant 2: the streak was the fault of this explorer, and must not end the run as well.
        if {*self._rewards_failed} == {explorer}:
            self._rewards_failed.clear()
        return self._exclusions.add(
            ExplorerExcluded(explorer=explorer, malformed=0, reason=reason, failed=failures)
        )

    @property
    def rewards_failed(self) -> int:
        """Number of requests whose reward failed since the last answer of any explorer."""
        return len(self._rewards_failed)

    @property
    def ends_run(self) -> bool:
        """True once so many rewards failed in a row that the run is to end."""
        return self.rewards_failed >= self._limit

    def _others_answer(self, explorer: str) -> bool:
        """Return True if the last request of another explorer was answered."""
        return any(
            failures == 0 and name != explorer and name not in self._exclusions
            for name, failures in self._failures.items()
        )

    def _set(self, explorer: str, failures: int) -> None:
        self._failures.pop(explorer, None)
        self._failures[explorer] = failures
        _drop_first(self._failures)


def _drop_first(names: dict[str, int] | dict[str, ExplorerExcluded]) -> None:
    if len(names) > _KEPT_NAMES:
        del names[next(iter(names))]
