"""Explorers whose answers are not taken, since several were malformed. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

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
        explorers: Names of the excluded explorers, in the order of their exclusions.
    """

    def __init__(
        self, message: str, *, run_id: str = "", explorers: Sequence[ExplorerExcluded] = ()
    ) -> None:
        self.run_id = run_id
        self.explorers = tuple(exclusion.explorer for exclusion in explorers)
        named = "; ".join(
            format_exclusion(exclusion.explorer, exclusion.malformed, exclusion.reason)
            for exclusion in explorers[:_NAMED]
        )
        unnamed = len(explorers) - _NAMED
        more = f"; {unnamed} further explorers are excluded" if unnamed > 0 else ""
        way_out = "start other explorers, or mend these and resume the run"
        super().__init__(f"{message}; {named}{more}: {way_out}" if explorers else message)


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
        if explorer in self._excluded:
            return None
        count = self._malformed.pop(explorer, 0) + 1
        self._malformed[explorer] = count
        _drop_first(self._malformed)
        if count < MALFORMED_ANSWERS:
            return None
        del self._malformed[explorer]
        excluded = ExplorerExcluded(explorer=explorer, malformed=count, reason=reason)
        self._excluded[explorer] = excluded
        _drop_first(self._excluded)
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


def _drop_first(names: dict[str, int] | dict[str, ExplorerExcluded]) -> None:
    if len(names) > _KEPT_NAMES:
        del names[next(iter(names))]
