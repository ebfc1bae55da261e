"""Spans of a run: what each process did, and from when to when, by its events alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct, field

from trinity_schemas import (
    Envelope,
    Event,
    ExpiredAttempt,
    LeaseExpired,
    SaveFailed,
    SaveFinished,
    SaveProgressed,
    SaveRequested,
    SaveStarted,
    Slot,
    StepRef,
    StepTrained,
    Trace,
    VersionPartPublished,
    WaitEnded,
    WaitStarted,
    WeightsApplied,
)

from ..core import MonitorState
from ..core.fold_state import format_producer, trim_oldest
from ..core.limits import KEPT_UNDER_WAY, KEPT_WAITS

Category = Literal["save", "publish", "version", "fetch", "pause", "wait", "train"]

_Report = SaveRequested | SaveStarted | SaveProgressed | SaveFinished | SaveFailed | ExpiredAttempt
"""Report about an attempt: each has the attempt's save id and slot."""

MILLISECOND = 1_000_000
"""Nanoseconds of a millisecond, the unit of entries' ids."""
_NAMED = 16
"""Maximum processes that the facts of a wait name."""


class Span(Struct, kw_only=True):
    """Activity of a process with a begin and an end, in nanoseconds."""

    process: str
    """Role and rank of the process."""
    lane: str
    """Track of the process, on which spans do not overlap."""
    name: str
    category: Category
    begin: int
    end: int
    entry: str
    """Entry that ended it; of an open one, the entry that began it."""
    event: Event | None = None
    """Event that ended it; of an open one, the last report of its progress."""
    is_open: bool = True
    """True if no event ended it."""
    has_start: bool = True
    """False if the start is not in the log: the begin follows from a measured duration, or is the
    first sign of it."""
    facts: dict[str, str | int] = field(default_factory=dict)
    waits_for: tuple[str, ...] = ()
    """Processes that a wait is for, by its last report."""
    flows: list[int] = field(default_factory=list)
    """Flows that begin in the span."""
    flow_end: int | None = None
    """Flow that ends in the span."""
    step: StepRef | None = None
    """Step that the span is of."""
    trace: Trace | None = None
    """Trace context of the event that ended it, if it sent one."""


def entry_time(entry_id: str) -> int:
    """Return the nanoseconds of an entry."""
    return int(entry_id.partition("-")[0]) * MILLISECOND


class SpanBuilder:
    """Builder of spans from entries in the order of their ids.

    Times are those of the entries, so that one clock counts for all processes; durations are those
    that processes measured. An attempt has a span for its turn, if it waits for one, and one for
    its save.

    Args:
        state: State before the first entry: its attempts and waits are open.
    """

    def __init__(self, state: MonitorState | None = None) -> None:
        self._attempts: dict[str, Span] = {}
        self._waits: dict[str, Span] = {}
        self._trained: dict[str, int] = {}
        """Process to the time of its last trained step."""
        if state is not None:
            self._open_all(state)

    def add(self, entry_id: str, envelope: Envelope) -> Iterator[Span]:
        """Yield the spans that an entry ends."""
        match envelope.event:
            case WaitStarted() as event:
                self._open_wait(entry_id, envelope, event)
            case WaitEnded() as event:
                yield self._end_wait(entry_id, envelope, event)
            case WeightsApplied() as event:
                yield from _apply(entry_id, envelope, event)
            case StepTrained() as event:
                yield self._train(entry_id, envelope, event)
            case event:
                yield from self._add_report(entry_id, envelope, event)

    def finish(self, end: int, outcome: str) -> Iterator[Span]:
        """Yield the open spans, up to a time in nanoseconds."""
        for open_spans in (self._attempts, self._waits):
            for span in open_spans.values():
                span.end = max(end, span.begin)
                span.facts["outcome"] = outcome
                yield span
            open_spans.clear()

    def _open_all(self, state: MonitorState) -> None:
        for save_id, attempt in state.attempts.items():
            self._attempts[save_id] = _attempt_span(
                format_producer(attempt.holder),
                save_id,
                attempt.slot,
                StepRef(state.epoch, attempt.slot.step),
                attempt.since * MILLISECOND,
                state.position,
                # An attempt that has not started waits for its turn.
                is_turn=not attempt.started,
            )
        for wait_id, wait in state.waits.items():
            begin = wait.since * MILLISECOND
            self._waits[wait_id] = Span(
                process=wait.by,
                lane=f"wait {wait_id}",
                name=f"waits for {wait.what}",
                category="wait",
                begin=begin,
                end=begin,
                entry=state.position,
                waits_for=wait.waits_for,
            )

    def _add_report(self, entry_id: str, envelope: Envelope, event: Event) -> Iterator[Span]:
        """Yield the spans of attempts that an event ends; open one that it begins."""
        match event:
            case SaveRequested():
                self._open_attempt(entry_id, envelope, event)
            case SaveStarted(save_id=save_id):
                if save_id in self._attempts and self._attempts[save_id].category == "wait":
                    # The wait for the turn ends here, and the span of the save itself begins.
                    yield _close(self._attempts.pop(save_id), entry_id, envelope, "granted")
                self._open_attempt(entry_id, envelope, event)
            case SaveProgressed():
                self._find_attempt(entry_id, envelope, event).event = event
            case SaveFinished(seconds=seconds):
                yield self._end_attempt(entry_id, envelope, event, "finished", seconds)
            case SaveFailed(message=message):
                yield self._end_attempt(entry_id, envelope, event, f"failed: {message}")
            case LeaseExpired(attempts=attempts):
                for attempt in attempts:
                    yield self._end_attempt(entry_id, envelope, attempt, "lease expired")
            case VersionPartPublished():
                yield self._end_part(entry_id, envelope, event)
            case _:
                pass

    def _open_attempt(self, entry_id: str, envelope: Envelope, report: _Report) -> Span:
        event, slot = envelope.event, report.slot
        # An expiry is published by the reducer, about the attempts of another process.
        holder = event.holder if isinstance(event, LeaseExpired) else envelope.producer
        span = self._attempts[report.save_id] = _attempt_span(
            format_producer(holder),
            report.save_id,
            slot,
            StepRef(envelope.epoch, slot.step),
            entry_time(entry_id),
            entry_id,
            is_turn=isinstance(event, SaveRequested),
        )
        trim_oldest(self._attempts, KEPT_UNDER_WAY)
        return span

    def _find_attempt(self, entry_id: str, envelope: Envelope, report: _Report) -> Span:
        """Return an attempt's open span; a new one if its start is not in the log."""
        span = self._attempts.get(report.save_id)
        if span is None:
            span = self._open_attempt(entry_id, envelope, report)
            # The log begins after it, or the event was lost: the duration gives the begin.
            span.has_start = False
        return span

    def _end_attempt(
        self,
        entry_id: str,
        envelope: Envelope,
        report: _Report,
        outcome: str,
        seconds: float = 0.0,
    ) -> Span:
        span = self._find_attempt(entry_id, envelope, report)
        del self._attempts[report.save_id]
        return _close(span, entry_id, envelope, outcome, seconds)

    def _end_part(self, entry_id: str, envelope: Envelope, event: VersionPartPublished) -> Span:
        span = None if event.save_id is None else self._attempts.pop(event.save_id, None)
        if span is None:
            lane, name = f"part {event.step}.{event.rank}", f"weights step {event.step}"
            span = _open(entry_id, envelope, lane, name, "publish", event.step)
            span.has_start = False
        span.facts |= {"bytes": event.bytes, "digest": event.manifest_digest}
        span.trace = envelope.trace
        return _close(span, entry_id, envelope, "finished", event.seconds)

    def _open_wait(self, entry_id: str, envelope: Envelope, event: WaitStarted) -> None:
        span = self._waits.get(event.wait_id)
        # A wait is reported again while it lasts: only its first report opens a span.
        if span is None:
            lane, name = f"wait {event.wait_id}", f"waits for {event.what}"
            span = self._waits[event.wait_id] = _open(entry_id, envelope, lane, name, "wait")
            # A wait is reported once it has lasted for some seconds (decision 24).
            span.begin -= _nanoseconds(event.seconds)
            span.facts["for"] = ", ".join(event.waits_for[:_NAMED])
            trim_oldest(self._waits, KEPT_WAITS)
        span.waits_for = event.waits_for

    def _end_wait(self, entry_id: str, envelope: Envelope, event: WaitEnded) -> Span:
        span = self._waits.pop(event.wait_id, None)
        if span is None:
            span = _open(entry_id, envelope, f"wait {event.wait_id}", "waited", "wait")
            span.has_start = False
        return _close(span, entry_id, envelope, event.outcome, event.seconds)

    def _train(self, entry_id: str, envelope: Envelope, event: StepTrained) -> Span:
        """Return the span of a trained step, which begins with the end of the one before."""
        span = _open(entry_id, envelope, "steps", f"step {event.step}", "train", event.step)
        begin = self._trained.get(span.process)
        self._trained[span.process] = span.end
        span.begin, span.has_start = begin or span.begin, begin is not None
        span.event, span.is_open = event, False
        return span


def _attempt_span(
    process: str, save_id: str, slot: Slot, step: StepRef, begin: int, entry: str, *, is_turn: bool
) -> Span:
    category: Category = "publish" if slot.kind == "weights" else "save"
    return Span(
        process=process,
        lane=f"{slot.name} {save_id}",
        name=f"waits for its turn to save {slot.kind}"
        if is_turn
        else f"{slot.kind} step {slot.step}",
        category="wait" if is_turn else category,
        begin=begin,
        end=begin,
        entry=entry,
        facts={"step": slot.step, "kind": slot.kind, "save_id": save_id},
        step=step,
    )


def _open(
    entry_id: str,
    envelope: Envelope,
    lane: str,
    name: str,
    category: Category,
    step: int | None = None,
) -> Span:
    """Return a span of an event's sender that begins and ends with the event."""
    at = entry_time(entry_id)
    return Span(
        process=format_producer(envelope.producer),
        lane=lane,
        name=name,
        category=category,
        begin=at,
        end=at,
        entry=entry_id,
        step=None if step is None else StepRef(envelope.epoch, step),
    )


def _close(
    span: Span, entry_id: str, envelope: Envelope, outcome: str, seconds: float = 0.0
) -> Span:
    span.end, span.entry = entry_time(entry_id), entry_id
    if not span.has_start:
        span.begin = min(span.begin, span.end - _nanoseconds(seconds))
    span.begin = min(span.begin, span.end)
    span.event, span.is_open = envelope.event, False
    span.facts["outcome"] = outcome
    return span


def _apply(entry_id: str, envelope: Envelope, event: WeightsApplied) -> Iterator[Span]:
    """Yield the spans of an application: the fetch, which is verified at its end, and the pause."""
    name = f"version {event.version.epoch}/{event.version.step}"
    pause = _open(entry_id, envelope, "pause", name, "pause")
    # The event comes at the end of the pause.
    pause.begin -= _nanoseconds(event.phases.pause)
    pause.trace = envelope.trace
    fetch = _open(entry_id, envelope, "fetch", name, "fetch")
    # An explorer whose clock is ahead of the server's would verify after it had installed.
    fetch.end = min(_nanoseconds(event.verified_at), pause.begin)
    fetch.begin = fetch.end - _nanoseconds(event.phases.fetch)
    fetch.facts = {"bytes": event.bytes, "digest": event.digest}
    for span in (fetch, pause):
        span.step, span.event, span.is_open = event.version, event, False
        yield span


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
