"""Grouping of events into spans: a save from start to finish, a wait from begin to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from trinity_schemas import (
    Envelope,
    LeaseExpired,
    SaveFailed,
    SaveFinished,
    SaveProgressed,
    SaveRequested,
    SaveStarted,
    StepFailed,
    StepReady,
    StepTrained,
    VersionPartPublished,
    WaitEnded,
    WaitStarted,
    WeightsApplied,
    event_tag,
)

from ..core import MonitorState
from ..core.fold_state import format_producer
from ..log import position
from .categories import CATEGORIES, FAILURE, READY, category_of, step_of

SAVE, PUBLISH = CATEGORIES.index("save"), CATEGORIES.index("publish")
APPLY, WAIT = CATEGORIES.index("apply"), CATEGORIES.index("wait")
TRAIN = CATEGORIES.index("train")


class EventSpan(Struct):
    """Group of events of one lane; an instant has an end equal to its begin."""

    lane: str
    begin: int
    end: int
    category: int
    label: str
    entry: str
    """Entry that ended it, or the last one that is known of it."""
    step: int | None = None
    outcome: str = ""
    count: int = 1
    """Number of spans that it stands for, when they are too near to be told apart."""
    detail: str = ""


class Grouping:
    """Grouping of the entries of one window of time.

    Args:
        state: State before the first entry of the window: what is under way begins there.
        begin: Milliseconds at which the window begins.
    """

    def __init__(self, state: MonitorState, begin: int) -> None:
        self.spans: list[EventSpan] = []
        self._open: dict[str, EventSpan] = {}
        """Spans under way, by save id or wait."""
        self._trained: dict[str, int] = {}
        """Lane to the milliseconds of its last trained step."""
        for save_id, attempt in state.attempts.items():
            label = "saves" if attempt.started else "waits for its turn"
            category = PUBLISH if attempt.slot.kind == "weights" else SAVE
            self._open[save_id] = EventSpan(
                lane=format_producer(attempt.holder),
                begin=attempt.since,
                end=begin,
                category=category if attempt.started else WAIT,
                label=f"{label} {attempt.slot.kind}",
                entry=state.position,
                step=attempt.slot.step,
            )
        for name, wait in state.waits.items():
            self._open[name] = EventSpan(
                wait.by, wait.since, begin, WAIT, f"waits for {wait.what}", state.position
            )

    def add(self, entry_id: str, envelope: Envelope) -> None:
        """Take an event, in the order of the log."""
        group = _GROUP.get(type(envelope.event), Grouping._instant)
        group(self, entry_id, position(entry_id)[0], envelope, envelope.event)

    def announced(self, entry_id: str, announcement: Envelope) -> None:
        """Add an announcement that followed from an entry."""
        event: Any = announcement.event
        if isinstance(event, StepReady | StepFailed):
            at, ready = position(entry_id)[0], isinstance(event, StepReady)
            self.spans.append(
                EventSpan(
                    lane="reducer-0",
                    begin=at,
                    end=at,
                    category=READY if ready else FAILURE,
                    label=f"{event.kind} of step {event.step} {'ready' if ready else 'failed'}",
                    entry=entry_id,
                    step=event.step,
                    outcome="ready" if ready else "failed",
                    detail="" if ready else getattr(event, "reason", "")[:300],
                )
            )

    def finish(self, end: int) -> list[EventSpan]:
        """Return all spans; those under way reach to the end of the window."""
        for span in self._open.values():
            span.end = max(end, span.begin)
            span.outcome = "under way"
        self.spans += self._open.values()
        self._open = {}
        return self.spans

    def _instant(self, entry_id: str, at: int, envelope: Envelope, event: Any) -> None:
        self.spans.append(
            EventSpan(
                lane=format_producer(envelope.producer),
                begin=at,
                end=at,
                category=category_of(event),
                label=event_tag(event),
                entry=entry_id,
                step=step_of(event),
            )
        )

    def _begin(self, entry_id: str, at: int, envelope: Envelope, event: Any) -> None:
        requested = isinstance(event, SaveRequested)
        if not requested:
            self._end(event.save_id, entry_id, at, "granted")
        kind = event.slot.kind
        self._open[event.save_id] = EventSpan(
            lane=format_producer(envelope.producer),
            begin=at,
            end=at,
            category=WAIT if requested else PUBLISH if kind == "weights" else SAVE,
            label=f"{'waits for its turn to save' if requested else 'saves'} {kind}",
            entry=entry_id,
            step=event.slot.step,
        )

    def _progressed(self, entry_id: str, at: int, envelope: Envelope, event: Any) -> None:
        span = self._open.get(event.save_id)
        if span is None:
            self._begin(entry_id, at, envelope, event)
            span = self._open[event.save_id]
        of = f" of {event.total:,}" if event.total else ""
        span.detail = f"{event.bytes:,}{of} bytes"

    def _ended(self, entry_id: str, at: int, envelope: Envelope, event: Any) -> None:
        failed = isinstance(event, SaveFailed)
        if event.save_id not in self._open:
            self._begin(entry_id, at, envelope, event)
            seconds = getattr(event, "seconds", 0.0)
            self._open[event.save_id].begin = at - int(seconds * 1000)
        detail = (
            f"{event.error_type}: {event.message}"[:300] if failed else f"{event.bytes:,} bytes"
        )
        self._end(event.save_id, entry_id, at, "failed" if failed else "finished", detail)

    def _published(self, entry_id: str, at: int, envelope: Envelope, event: Any) -> None:
        save_id = event.save_id or f"part/{event.step}/{event.rank}"
        if save_id not in self._open:
            self._open[save_id] = EventSpan(
                format_producer(envelope.producer),
                at - int(event.seconds * 1000),
                at,
                PUBLISH,
                "publishes weights",
                entry_id,
                event.step,
            )
        self._open[save_id].label = "publishes weights"
        self._end(save_id, entry_id, at, "published", f"{event.bytes:,} bytes")

    def _expired(self, entry_id: str, at: int, envelope: Envelope, event: Any) -> None:
        self._instant(entry_id, at, envelope, event)
        for attempt in event.attempts:
            silent = f"silent for {event.lease:g} s"
            self._end(attempt.save_id, entry_id, at, "failed", silent)

    def _waits(self, entry_id: str, at: int, envelope: Envelope, event: Any) -> None:
        lane = format_producer(envelope.producer)
        name = event.wait_id
        span = self._open.get(name)
        if span is None:
            begin = at - int(event.seconds * 1000)
            span = self._open[name] = EventSpan(
                lane, begin, at, WAIT, f"waits for {event.what}"[:200], entry_id
            )
        named = ", ".join(event.waits_for[:8])
        span.detail = f"from {named}" if named else ""

    def _waited(self, entry_id: str, at: int, envelope: Envelope, event: Any) -> None:
        if event.wait_id not in self._open:
            lane = format_producer(envelope.producer)
            begin = at - int(event.seconds * 1000)
            self._open[event.wait_id] = EventSpan(lane, begin, at, WAIT, "waited", entry_id)
        self._end(event.wait_id, entry_id, at, event.outcome)

    def _applied(self, entry_id: str, at: int, envelope: Envelope, event: Any) -> None:
        lane, step, phases = format_producer(envelope.producer), event.version.step, event.phases
        pause = at - int(phases.pause * 1000)
        fetch = pause - int(phases.fetch * 1000)
        fetched = f"fetches and verifies step {step}"
        self.spans.append(EventSpan(lane, fetch, pause, APPLY, fetched, entry_id, step, "fetched"))
        applied = f"installs step {step}"
        self.spans.append(
            EventSpan(lane, pause, at, APPLY, applied, entry_id, step, "applied", 1, event.digest)
        )

    def _trained_step(self, entry_id: str, at: int, envelope: Envelope, event: Any) -> None:
        lane = format_producer(envelope.producer)
        begin = self._trained.get(lane, at)
        self._trained[lane] = at
        label = f"step {event.step}"
        self.spans.append(EventSpan(lane, begin, at, TRAIN, label, entry_id, event.step, "trained"))

    def _end(
        self, name: str, entry_id: str, at: int, outcome: str, detail: str | None = None
    ) -> None:
        span = self._open.pop(name, None)
        if span is None:
            return
        span.end, span.entry, span.outcome = max(at, span.begin), entry_id, outcome
        if outcome == "failed":
            span.category = FAILURE
        if detail is not None:
            span.detail = detail
        self.spans.append(span)


_GROUP: dict[type, Callable[[Grouping, str, int, Envelope, Any], None]] = {
    SaveRequested: Grouping._begin,
    SaveStarted: Grouping._begin,
    SaveProgressed: Grouping._progressed,
    SaveFinished: Grouping._ended,
    SaveFailed: Grouping._ended,
    VersionPartPublished: Grouping._published,
    LeaseExpired: Grouping._expired,
    WaitStarted: Grouping._waits,
    WaitEnded: Grouping._waited,
    WeightsApplied: Grouping._applied,
    StepTrained: Grouping._trained_step,
}


def merged(spans: list[EventSpan], resolution: float) -> list[EventSpan]:
    """Return spans by lane and begin; those of one category nearer than a pixel become one.

    A failure stays by itself.

    Args:
        spans: The spans of all lanes.
        resolution: Milliseconds of a pixel.
    """
    result: list[EventSpan] = []
    last: dict[tuple[str, int], EventSpan] = {}
    for span in sorted(spans, key=lambda span: (span.lane, span.begin, -span.end)):
        key = (span.lane, span.category)
        near = last.get(key)
        short = span.end - span.begin < 2 * resolution
        if (
            near is not None
            and short
            and "failed" not in (near.outcome, span.outcome)
            and near.end - near.begin < 6 * resolution
            and span.begin - near.end < resolution
        ):
            near.end = max(near.end, span.end)
            near.count += span.count
            near.entry = span.entry
            continue
        result.append(span)
        last[key] = span
    return result
