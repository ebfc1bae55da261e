"""Audit of the rollout ledger: the fate of each dispatched ordinal, counted from the log.

1. An event counts once, and only in the epoch that is current at its place in the log.
2. Of an epoch that was resumed from, steps after the checkpoint count for nothing.
3. A contradiction is added to the books, and never raised: an audit always has a result.
4. Each dispatched ordinal is trained, dropped or open; the sums are compared at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec
from msgspec import Struct, field

from trinity_schemas import (
    Envelope,
    LedgerRestored,
    RolloutsDispatched,
    RunOpened,
    RunResumed,
    StepTrained,
)

from ..core.ledger import Ledger, LedgerError
from ..core.lineage import EpochSpan, continued_lineage, lineage_spans
from ..core.ordinal_ranges import Range, count, difference, format_ranges, intersection, union
from ..core.state import MonitorState

RESUMED = "resumed"
"""Reason for which a later epoch asks again for the ordinals of an earlier one."""


class Contradiction(Struct, frozen=True, kw_only=True):
    """Fact of the log for which the books do not balance."""

    epoch: int
    name: str
    detail: str
    ordinals: tuple[Range, ...] = ()


class LineageBooks(Struct, kw_only=True):
    """Books of one lineage: of a run's opening, and of the epochs that resumed it."""

    spans: list[EpochSpan]
    """Epochs whose steps count, each with its first and last step."""
    balanced: bool = True
    """True if each dispatched ordinal has one fate or is open, without any contradiction."""
    fingerprint: str | None = None
    """Fingerprint of the task set."""
    steps: int = 0
    """Training steps that count."""
    discarded_steps: int = 0
    """Training steps that a resume from an earlier checkpoint discarded."""
    dispatched: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of dropped ordinals by reason."""
    open: int = 0
    open_ordinals: list[Range] = field(default_factory=list)
    dropped_ordinals: dict[str, list[Range]] = field(default_factory=dict)
    """Dropped ordinals by reason, as far as the log names them."""
    recomputed: dict[str, int] = field(default_factory=dict)
    """Requests beyond the first one of an ordinal, by the reason for them."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Staleness in steps to the number of trained samples."""
    contradictions: list[Contradiction] = field(default_factory=list)


class Audit(Struct, frozen=True, kw_only=True):
    """Result of an audit of a run."""

    run_id: str
    balanced: bool
    """True if the books of every lineage balance."""
    lineages: list[LineageBooks]
    """Lineages that dispatched rollouts, oldest first; the last one is the current one."""
    ignored: int
    """Events of rollouts that change nothing: repeated ones, and those of an older epoch."""


_Fact = RolloutsDispatched | StepTrained | LedgerRestored


class _Epoch(Struct):
    """Epoch with its events of rollouts, in the order of the log."""

    number: int
    starts_empty: bool
    facts: list[_Fact] = field(default_factory=list)


class _Root(Struct):
    """Opening of a run, with all epochs that resumed it, and the spans of them that count."""

    epochs: list[_Epoch]
    spans: list[EpochSpan]


class Auditor:
    """Counter of a run's events of rollouts.

    It keeps them all, as a later resume may discard some of them.
    """

    def __init__(self, run_id: str) -> None:
        self._lineage = MonitorState(run_id=run_id)
        self._roots: list[_Root] = []
        self._sequences: dict[str, int] = {}
        self._ignored = 0

    def add(self, envelope: Envelope) -> None:
        """Take the next event of the log."""
        event = envelope.event
        if isinstance(event, RunOpened | RunResumed):
            if envelope.epoch > self._lineage.epoch:
                self._open(envelope.epoch, event)
        elif isinstance(event, _Fact):
            if not self._counts(envelope):
                self._ignored += 1
                return
            if isinstance(event, StepTrained):
                # All events stay in memory, and metrics are no part of the books.
                event = msgspec.structs.replace(event, metrics={})
            self._roots[-1].epochs[-1].facts.append(event)

    def audit(self) -> Audit:
        """Return the books of the events so far."""
        lineages = [
            _Bookkeeper(root).books
            for root in self._roots
            # An opening that dispatched nothing has no books.
            if any(epoch.facts for epoch in root.epochs)
        ]
        return Audit(
            run_id=self._lineage.run_id,
            balanced=all(lineage.balanced for lineage in lineages),
            lineages=lineages,
            ignored=self._ignored,
        )

    def _open(self, number: int, opening: RunOpened | RunResumed) -> None:
        self._lineage.lineage = continued_lineage(self._lineage, opening)
        self._lineage.epoch = number
        if isinstance(opening, RunOpened):
            empty = True
        else:
            empty = opening.checkpoint is None and not opening.step
        # A log whose first entries are gone may begin with a resume.
        if isinstance(opening, RunOpened) or not self._roots:
            self._roots.append(_Root([], []))
        root = self._roots[-1]
        root.epochs.append(_Epoch(number, empty))
        root.spans = lineage_spans(self._lineage)

    def _counts(self, envelope: Envelope) -> bool:
        """Return True for the first copy of an event of the current epoch."""
        name = envelope.producer.incarnation
        if envelope.sequence <= self._sequences.get(name, 0):
            return False
        self._sequences[name] = envelope.sequence
        return envelope.epoch == self._lineage.epoch > 0


class _Bookkeeper:
    """Reader of the epochs since an opening, which fills the books."""

    def __init__(self, root: _Root) -> None:
        self.books = LineageBooks(spans=root.spans)
        self._ledger = Ledger()
        self._epoch = 0
        self._newest_step = 0
        self._has_ledger = True
        epochs = {epoch.number: epoch for epoch in root.epochs}
        for span in root.spans:
            if span.epoch in epochs:
                self._read(epochs[span.epoch], span)
        self._count_requests(root.epochs)
        self._close()

    def _read(self, epoch: _Epoch, span: EpochSpan) -> None:
        """Read the events of an epoch, up to the last of its steps that counts."""
        self._epoch, self._newest_step = epoch.number, span.first
        self._has_ledger = epoch.starts_empty
        if epoch.starts_empty:
            self._ledger = Ledger()
        for fact in epoch.facts:
            match fact:
                case LedgerRestored():
                    self._restore(fact, span.first)
                case RolloutsDispatched():
                    self._require_ledger()
                    self._dispatch(fact)
                    if span.last is None:
                        # The ledger of an epoch that resumes this one has them open.
                        self._drop(fact.dropped)
                case StepTrained():
                    # A resume from an earlier checkpoint has discarded the rest of the epoch.
                    if span.last is not None and fact.step > span.last:
                        return
                    self._require_ledger()
                    self._train(fact)

    def _require_ledger(self) -> None:
        if not self._has_ledger:
            self._has_ledger = True
            self._contradict("no-ledger", "the epoch resumed a step and restored no ledger")

    def _restore(self, fact: LedgerRestored, first_step: int) -> None:
        """Go on with the ledger of a checkpoint, if it agrees with the log up to its step."""
        own, ledger = self._ledger, fact.ledger
        # Only right after the resume: later it would replace fates that the log has.
        if self._has_ledger and own.next:
            self._contradict("ledger-late", "the epoch has dispatched rollouts already")
            return
        self._has_ledger = True
        if ledger.step != first_step:
            self._contradict(
                "ledger-step", f"a ledger of step {ledger.step} for a resume of step {first_step}"
            )
        if ledger.digest != fact.digest:
            self._contradict("ledger-digest", "the ledger differs from its digest")
        try:
            self._ledger = Ledger.restored(ledger)
        # Sums that contradict themselves cannot be gone on with: the log's own ledger stays.
        except LedgerError as error:
            self._contradict("ledger-sums", str(error))
            return
        self._compare(own, self._ledger, f"the ledger of step {ledger.step}")

    def _compare(self, own: Ledger, restored: Ledger, what: str) -> None:
        """Compare the ledger that follows from the log with the one of a checkpoint.

        A checkpoint may have more dropped ordinals: the log tells them with the next step.
        """
        if restored.trained != own.trained:
            self._contradict(
                "ledger-differs",
                f"{what} has {restored.trained} trained ordinals, and the log has {own.trained}",
            )
        self._contradict_ordinals(
            "fate-lost",
            difference(own.settled_ranges(), restored.settled_ranges()),
            f"have a fate in the log and none in {what}",
        )
        if restored.next > own.next:
            self._contradict_ordinals(
                "dispatch-unlogged",
                [(own.next, restored.next - 1)],
                f"are dispatched in {what} and not in the log",
            )

    def _dispatch(self, fact: RolloutsDispatched) -> None:
        if fact.fingerprint is not None:
            self._ledger.fingerprint = fact.fingerprint
        fated, skipped = self._ledger.add_dispatched(fact.ordinals)
        again = self._ledger.contradictions(
            union((request.ordinal, request.ordinal) for request in fact.reissued)
        )
        self._contradict_ordinals(
            "dispatched-after-fate", union(fated, again.settled), "were asked for after their fate"
        )
        self._contradict_ordinals("dispatch-gap", skipped, "were skipped by the dispatch")
        self._contradict_ordinals(
            "reissued-without-dispatch",
            again.undispatched,
            "were asked for again before they were dispatched",
        )

    def _train(self, fact: StepTrained) -> None:
        books, step = self.books, fact.step
        if step <= self._newest_step:
            self._contradict("step-again", f"step {step} came after step {self._newest_step}")
        self._newest_step = max(self._newest_step, step)
        books.steps += 1
        for late, number in fact.staleness.items():
            books.staleness[late] = books.staleness.get(late, 0) + number
        self._settle(None, fact.trained, "trained-twice", f"trained in step {step}")
        self._drop(fact.dropped)

    def _drop(self, dropped: Mapping[str, tuple[Range, ...]]) -> None:
        named = self.books.dropped_ordinals
        for reason, ordinals in dropped.items():
            self._settle(reason, ordinals, "dropped-after-fate", f"dropped ({reason})")
            named[reason] = union(named.get(reason, []), ordinals)

    def _settle(
        self, reason: str | None, ordinals: tuple[Range, ...], twice: str, what: str
    ) -> None:
        try:
            contradictions = self._ledger.settle(reason, ordinals)
        except LedgerError as error:
            self._contradict("ledger-full", str(error))
            return
        self._contradict_ordinals(
            twice, contradictions.settled, f"were {what} and had a fate already"
        )
        self._contradict_ordinals(
            "fate-without-dispatch",
            contradictions.undispatched,
            f"were {what} and never dispatched",
        )

    def _count_requests(self, epochs: list[_Epoch]) -> None:
        """Count the requests beyond the first of each ordinal, also those of discarded steps."""
        recomputed, steps, requested_ordinals = Counter[str](), 0, list[Range]()
        for epoch in epochs:
            for fact in epoch.facts:
                if isinstance(fact, RolloutsDispatched):
                    recomputed.update(request.reason for request in fact.reissued)
                    # Ordinals that an earlier epoch of the lineage has asked for too.
                    recomputed[RESUMED] += count(intersection(requested_ordinals, fact.ordinals))
                    requested_ordinals = union(requested_ordinals, fact.ordinals)
                elif isinstance(fact, StepTrained):
                    steps += 1
        self.books.recomputed = {
            why: number for why, number in sorted(recomputed.items()) if number
        }
        self.books.discarded_steps = steps - self.books.steps

    def _close(self) -> None:
        books, ledger = self.books, self._ledger
        books.fingerprint = ledger.fingerprint
        books.dispatched, books.trained = ledger.next, ledger.trained
        books.dropped = dict(sorted(ledger.dropped.items()))
        books.staleness = dict(sorted(books.staleness.items()))
        books.open_ordinals = ledger.open_ranges()
        books.open = count(books.open_ordinals)
        if books.dispatched != books.trained + sum(books.dropped.values()) + books.open:
            self._contradict("sums", "dispatched differs from trained, dropped and open together")
        books.balanced = not books.contradictions

    def _contradict_ordinals(self, name: str, ordinals: list[Range], detail: str) -> None:
        if ordinals:
            text = f"ordinals {format_ranges(ordinals)} {detail}"
            self._contradict(name, text, tuple(ordinals))

    def _contradict(self, name: str, detail: str, ordinals: tuple[Range, ...] = ()) -> None:
        self.books.contradictions.append(
            Contradiction(epoch=self._epoch, name=name, detail=detail, ordinals=ordinals)
        )
