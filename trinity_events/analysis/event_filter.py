"""Filter of a log's entries by type, producer, step and time."""

from __future__ import annotations

from msgspec import Struct

from trinity_schemas import (
    Envelope,
    EvaluationFailed,
    EvaluationFinished,
    EvaluationStarted,
    Event,
    LeaseExpired,
    LedgerRestored,
    ResendRequested,
    SaveFailed,
    SaveFinished,
    SaveGranted,
    SaveProgressed,
    SaveRequested,
    SaveStarted,
    SyncRequested,
    WeightsApplied,
    event_tag,
)

from ..core.fold_state import format_producer

_OF_A_SLOT = (
    SaveRequested,
    SaveGranted,
    SaveStarted,
    SaveProgressed,
    SaveFinished,
    SaveFailed,
)
_OF_A_VERSION = (
    WeightsApplied,
    ResendRequested,
    EvaluationStarted,
    EvaluationFinished,
    EvaluationFailed,
)
_FIRST = (0, 0)
# Above every id: both numbers of an id of a stream have 64 bits.
_LAST = (2**64, 0)

Position = tuple[int, int]


class EventFilter(Struct, frozen=True, kw_only=True):
    """Filter of entries by type, producer, step and time.

    An empty field accepts every entry. Producers are named by role (``explorer``), by role and
    rank (``explorer-0``), or by host.
    """

    types: frozenset[str] = frozenset()
    producers: frozenset[str] = frozenset()
    steps: tuple[range, ...] = ()
    since: Position = _FIRST
    """Lowest position that is accepted."""
    until: Position = _LAST
    """Highest position that is accepted."""

    @property
    def has_conditions(self) -> bool:
        """Return True if the filter has types, producers or steps."""
        return bool(self.types or self.producers or self.steps)

    def in_time(self, position: Position) -> bool:
        """Return True if a position lies between ``since`` and ``until``."""
        return self.since <= position <= self.until

    def matches(self, envelope: Envelope) -> bool:
        """Return True if an envelope matches the types, producers and steps, at any position."""
        if self.types and event_tag(envelope.event) not in self.types:
            return False
        if self.producers and self.producers.isdisjoint(_names(envelope)):
            return False
        if not self.steps:
            return True
        steps = find_steps(envelope.event)
        return any(step in interval for step in steps for interval in self.steps)


def find_steps(event: Event) -> set[int]:
    """Return the training steps that an event is about."""
    match event:
        case SyncRequested(oldest_version=version):
            return set() if version is None else {version.step}
        case LeaseExpired(attempts=attempts):
            return {attempt.slot.step for attempt in attempts}
        case LedgerRestored(ledger=ledger):
            return {ledger.step}
        case _ if isinstance(event, _OF_A_SLOT):
            return {event.slot.step}
        case _ if isinstance(event, _OF_A_VERSION):
            return {event.version.step}
        case _:
            # All other events name their step themselves, if they are of one.
            step = getattr(event, "step", None)
            return set() if step is None else {step}


def _names(envelope: Envelope) -> set[str]:
    producer = envelope.producer
    return {producer.role, format_producer(producer), producer.node}
