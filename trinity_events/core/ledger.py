"""Ledger of the fates of ordinals: each is open, trained once, or dropped for one reason.

1. An ordinal has at most one fate, which never changes, and none before it is dispatched.
2. The sums of trained and dropped ordinals count exactly those that have a fate.
3. A change that is refused leaves the ledger as it was.
4. The ledger is bounded, whatever the order of fates: in ranges and in reasons.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, NamedTuple

from msgspec import Struct, field

from trinity_schemas import TrainedLedger

from ..errors import TrinityError
from .limits import KEPT_DROP_REASONS, KEPT_EXCEPTIONS
from .ordinal_ranges import (
    Range,
    count,
    difference,
    format_ranges,
    intersection,
    ordinals,
    ranges,
    union,
)

__all__ = ["Contradictions", "Ledger", "LedgerError", "ordinals", "ranges"]

OTHER_REASONS = "other"
"""Reason that stands for those beyond the limit of reasons."""


class LedgerError(TrinityError):
    """A fate contradicts the ledger, or the ledger contradicts itself or the run.

    Attributes:
        fault: What contradicts what.
        step: Step of the ledger or of the fate.
        ranges: Ordinals that are named.
        fate: Fate that they cannot have.
        actual: Number that was found.
        expected: Number that was expected.
    """

    fault: Literal[
        "sums",
        "fingerprint",
        "order",
        "undispatched",
        "settled",
        "exceptions",
        "second",
        "lineage",
        "digest",
        "untaken",
        "step",
    ]
    step: int | None = None
    ranges: tuple[Range, ...] = ()
    fate: str = ""
    actual: int | None = None
    expected: int | None = None
    texts: ClassVar = {
        "sums": "the ledger of step {step} counts {actual} fates for {expected} ordinals that have "
        "one",
        "fingerprint": "the ledger lacks the fingerprint of its task set: set it first",
        "order": "ordinals {_ordinals} cannot be dispatched: the next one is {expected}",
        "undispatched": "ordinals that were never dispatched cannot be {fate}: {_ordinals}",
        "settled": "ordinals that have a fate cannot be {fate}: {_ordinals}",
        "exceptions": "more than {expected} ranges above ordinal {actual} have a fate: settle the "
        "lowest open ordinals first",
        "second": "the epoch has a ledger already",
        "lineage": "a ledger of step {step}, and the run goes on from {expected}",
        "digest": "a ledger that differs from its digest",
        "untaken": "step {step} cannot train ordinals {_ordinals}: train each group once, that was "
        "taken",
        "step": "the ledger is that of step {actual}, not of step {step}",
    }

    @property
    def _ordinals(self) -> str:
        return format_ranges(self.ranges)


class Contradictions(NamedTuple):
    """Ordinals whose fates contradict the ledger."""

    settled: list[Range]
    """Ordinals that have a fate already."""
    undispatched: list[Range]
    """Ordinals that were not dispatched."""

    def __bool__(self) -> bool:
        return bool(self.settled or self.undispatched)


class Ledger(Struct, kw_only=True, omit_defaults=True):
    """Fates of the ordinals of a lineage, bounded.

    Every ordinal below ``mark`` has a fate. From ``mark`` on, those in ``settled`` have one; the
    others below ``next`` are open. The two sums count the fates of all ordinals.
    """

    mark: int = 0
    next: int = 0
    """Ordinal that is dispatched next."""
    settled: list[Range] = field(default_factory=list)
    """Ranges of ordinals above ``mark`` that have a fate, ascending."""
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of dropped ordinals by reason."""
    fingerprint: str | None = None
    """Fingerprint of the task set that the ordinals count in."""

    @classmethod
    def restored(cls, ledger: TrainedLedger) -> Ledger:
        """Return the ledger that a checkpoint holds.

        Raises:
            LedgerError: Its sums differ from the ordinals that have a fate.
        """
        restored = cls(
            mark=ledger.mark,
            next=ledger.next,
            settled=list(ledger.settled),
            trained=ledger.trained,
            dropped=dict(ledger.dropped),
            fingerprint=ledger.fingerprint,
        )
        fates = ledger.trained + sum(ledger.dropped.values())
        if fates != restored.settled_count:
            raise LedgerError("sums", ledger.step, actual=fates, expected=restored.settled_count)
        return restored

    def to_contract(self, step: int) -> TrainedLedger:
        """Return the ledger as a checkpoint of a step holds it."""
        if self.fingerprint is None:
            raise LedgerError("fingerprint", step)
        return TrainedLedger(
            step=step,
            mark=self.mark,
            next=self.next,
            settled=tuple(self.settled),
            trained=self.trained,
            dropped=dict(self.dropped),
            fingerprint=self.fingerprint,
        )

    def settled_ranges(self) -> list[Range]:
        """Return the ordinals that have a fate, as ranges."""
        return union([(0, self.mark - 1)] if self.mark else [], self.settled)

    @property
    def settled_count(self) -> int:
        """Return the number of ordinals that have a fate."""
        return self.mark + count(self.settled)

    @property
    def open_count(self) -> int:
        """Return the number of ordinals that were dispatched and have no fate."""
        return self.next - self.settled_count

    def format_sums(self) -> str:
        """Return the sums in words."""
        reasons = ", ".join(f"{reason} {number}" for reason, number in self.dropped.items())
        dropped = f"{sum(self.dropped.values())} dropped" + (f" ({reasons})" if reasons else "")
        return f"{self.trained} trained, {dropped}, {self.open_count} open"

    def is_open(self, ordinal: int) -> bool:
        """Return True if an ordinal was dispatched and has no fate."""
        if not self.mark <= ordinal < self.next:
            return False
        # The range before this index is the last one that begins at the ordinal or below it.
        at = bisect_left(self.settled, (ordinal + 1, 0))
        return at == 0 or self.settled[at - 1][1] < ordinal

    def open_ranges(self) -> list[Range]:
        """Return the ordinals that were dispatched and have no fate, as ranges."""
        if self.mark == self.next:
            return []
        return difference([(self.mark, self.next - 1)], self.settled)

    def open_ordinals(self) -> list[int]:
        """Return the ordinals that were dispatched and have no fate, ascending."""
        return list(ordinals(self.open_ranges()))

    def dispatch(self, first: int, last: int) -> None:
        """Open the next ordinals, from ``first`` to ``last``.

        Raises:
            LedgerError: ``first`` is not the next ordinal.
        """
        if first != self.next or last < first:
            raise LedgerError("order", ranges=((first, last),), expected=self.next)
        self.next = last + 1

    def add_dispatched(self, given: Sequence[Range]) -> Contradictions:
        """Open ordinals that the log says were dispatched, those that have no fate.

        Args:
            given: Ordinals, as ascending and disjoint ranges; open ones may be among them.

        Returns:
            The ordinals that have a fate, and those that were skipped, which are open now too.
        """
        if not given:
            return Contradictions([], [])
        settled = self.contradictions(given).settled
        skipped: list[Range] = []
        if given[-1][1] >= self.next:
            skipped = difference([(self.next, given[-1][1])], given)
            self.next = given[-1][1] + 1
        return Contradictions(settled, skipped)

    def train(self, ordinals: Iterable[int]) -> None:
        """Give open ordinals the fate of being trained.

        Raises:
            LedgerError: One has a fate or was never dispatched; the ledger is unchanged.
        """
        self._settle_open(None, list(ordinals))

    def drop(self, reason: str, ordinals: Iterable[int]) -> None:
        """Give open ordinals the fate of being dropped.

        Raises:
            LedgerError: One has a fate or was never dispatched; the ledger is unchanged.
        """
        self._settle_open(reason, list(ordinals))

    def _settle_open(self, reason: str | None, given: list[int]) -> None:
        fate = "trained" if reason is None else f"dropped ({reason})"
        given_ranges = ranges(given)
        contradictions = self.contradictions(given_ranges)
        if contradictions.undispatched:
            undispatched = tuple(contradictions.undispatched)
            raise LedgerError("undispatched", ranges=undispatched, fate=fate)
        # Ranges hide an ordinal that is given twice: the counts differ then.
        if contradictions.settled or count(given_ranges) != len(given):
            twice = contradictions.settled or ranges(
                ordinal for ordinal in given if given.count(ordinal) > 1
            )
            raise LedgerError("settled", ranges=tuple(twice), fate=fate)
        self.settle(reason, given_ranges)

    def settle(self, reason: str | None, given: Sequence[Range]) -> Contradictions:
        """Give ordinals a fate, those that are open; return the others.

        Args:
            reason: Reason for which they are dropped; None if they are trained.
            given: Ordinals, as ascending and disjoint ranges.

        Raises:
            LedgerError: The ledger would hold too many exceptions; it is unchanged.
        """
        contradictions = self.contradictions(given)
        fated = list(given)
        if contradictions:
            fated = difference(fated, union(*contradictions))
        # Before the sums, since it may refuse: nothing has changed then (3).
        self._absorb(fated)
        if reason is None:
            self.trained += count(fated)
        elif fated:
            if reason not in self.dropped and len(self.dropped) >= KEPT_DROP_REASONS:
                reason = OTHER_REASONS
            self.dropped[reason] = self.dropped.get(reason, 0) + count(fated)
        return contradictions

    def contradictions(self, given: Sequence[Range]) -> Contradictions:
        """Return the ordinals of ascending ranges that are not open."""
        # The usual case: above the mark, `settled` alone has ordinals with a fate.
        if not given or (given[0][0] >= self.mark and given[-1][1] < self.next):
            return Contradictions(intersection(given, self.settled), [])
        dispatched = [(0, self.next - 1)] if self.next else []
        return Contradictions(
            settled=intersection(given, self.settled_ranges()),
            undispatched=difference(given, dispatched),
        )

    def _absorb(self, fated: list[Range]) -> None:
        """Add ordinals to those that have a fate, and raise the mark over those it has reached."""
        if not fated:
            return
        settled = union(self.settled, fated)
        # The range at the mark is absorbed by it, and is no exception.
        reached = settled[0][0] == self.mark
        if len(settled) - reached > KEPT_EXCEPTIONS:
            raise LedgerError("exceptions", actual=self.mark, expected=KEPT_EXCEPTIONS)
        if reached:
            self.mark = settled.pop(0)[1] + 1
        self.settled = settled
