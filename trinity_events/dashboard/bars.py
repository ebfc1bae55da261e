"""Bars of a timeline: the spans of a window as a row shows them, and its events as instants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from trinity_schemas import (
    Envelope,
    Event,
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

from ..analysis.spans import MILLISECOND, Span, SpanBuilder
from ..core import MonitorState
from ..core.fold_state import format_producer
from ..log import position
from ..replay import Folded
from .categories import CATEGORIES, FAILURE, READY, find_category, find_step

_CATEGORIES = {
    span_category: CATEGORIES.index(category)
    for span_category, category in (
        *(("save", "save"), ("publish", "publish"), ("wait", "wait"), ("train", "train")),
        *(("fetch", "apply"), ("pause", "apply")),
    )
}
"""Category of a span to that of its bar."""
_OUTCOMES: dict[type[Event], str] = {
    SaveStarted: "granted",
    SaveFinished: "finished",
    SaveFailed: "failed",
    LeaseExpired: "failed",
    VersionPartPublished: "published",
    StepTrained: "trained",
}
"""Event that ends a span to the outcome of its bar."""
_IN_SPANS = (
    *(SaveRequested, SaveStarted, SaveProgressed, SaveFinished, SaveFailed, VersionPartPublished),
    *(WaitStarted, WaitEnded, WeightsApplied, StepTrained),
)
"""Events without an instant, since their spans show them."""
_NAMED = 8
"""Maximum processes that the detail of a wait names."""
_LABEL, _DETAIL = 200, 300
"""Maximum characters of a label, and of a detail."""


class Bar(Struct):
    """Bar of one lane, in milliseconds; an instant has an end equal to its begin."""

    lane: str
    begin: int
    end: int
    category: int
    label: str
    entry: str
    """Entry that ended it; of one under way, the entry that began it."""
    step: int | None = None
    outcome: str = ""
    count: int = 1
    """Number of bars that it stands for, when they are too near to be told apart."""
    detail: str = ""


def build_bars(
    state: MonitorState, entries: Iterable[Folded], begin: int, end: int
) -> Iterator[Bar]:
    """Yield the bars of a window; those under way reach to its end, or to its last entry.

    Args:
        state: State before the first entry.
        entries: Entries of the window. They may be folded into the state as they are read.
        begin: Milliseconds at which the window begins.
        end: Milliseconds at which it ends.
    """
    spans, last = SpanBuilder(state), begin
    for entry, envelope, announcements, _ in entries:
        last = max(last, position(entry.id)[0])
        if envelope is not None:
            for span in spans.add(entry.id, envelope):
                yield _span_bar(span)
            if not isinstance(envelope.event, _IN_SPANS):
                yield _instant(entry.id, envelope)
        for announcement in announcements:
            # The others follow from events that have bars of their own.
            if isinstance(announcement.event, StepReady | StepFailed):
                yield _outcome_instant(entry.id, announcement.event)
    for span in spans.finish(min(last, end) * MILLISECOND, "under way"):
        yield _span_bar(span)


def merge_bars(bars: Iterable[Bar], resolution: float) -> list[Bar]:
    """Return bars by lane and begin; those of one category nearer than a pixel become one.

    A failure stays by itself.

    Args:
        bars: The bars of all lanes.
        resolution: Milliseconds of a pixel.
    """
    result: list[Bar] = []
    last: dict[tuple[str, int], Bar] = {}
    # The longer of two that begin together first: it can take the other one up.
    for bar in sorted(bars, key=lambda bar: (bar.lane, bar.begin, -bar.end)):
        key = (bar.lane, bar.category)
        near = last.get(key)
        short = bar.end - bar.begin < 2 * resolution
        if (
            near is not None
            and short
            and "failed" not in (near.outcome, bar.outcome)
            # Bounded, so that many short bars in a row do not become one long one.
            and near.end - near.begin < 6 * resolution
            and bar.begin - near.end < resolution
        ):
            near.end = max(near.end, bar.end)
            near.count += bar.count
            near.entry = bar.entry
            continue
        result.append(bar)
        last[key] = bar
    return result


def _span_bar(span: Span) -> Bar:
    outcome, begin, end = _outcome(span), -(-span.begin // MILLISECOND), span.end // MILLISECOND
    if span.category == "fetch" and isinstance(span.event, WeightsApplied):
        # By the server's clock: it ends before the pause, whatever the explorer's clock shows.
        end = position(span.entry)[0] - int(1000 * span.event.phases.pause)
        begin = end - int(1000 * span.event.phases.fetch)
    return Bar(
        lane=span.process,
        begin=begin,
        end=end,
        # A failure has its colour, whatever was being done.
        category=FAILURE if outcome == "failed" else _CATEGORIES[span.category],
        label=_format_label(span)[:_LABEL],
        entry=span.entry,
        step=None if span.step is None else span.step.step,
        outcome=outcome,
        detail=_format_detail(span)[:_DETAIL],
    )


def _outcome(span: Span) -> str:
    if span.is_open or span.event is None:
        return "under way"
    match span.event:
        case WaitEnded(outcome=outcome):
            return outcome
        case WeightsApplied():
            return "fetched" if span.category == "fetch" else "applied"
        case event:
            return _OUTCOMES[type(event)]


def _format_label(span: Span) -> str:
    step = None if span.step is None else span.step.step
    match span.category:
        case "save" | "publish":
            is_part = isinstance(span.event, VersionPartPublished)
            return "publishes weights" if is_part else f"saves {span.facts['kind']}"
        case "fetch":
            return f"fetches and verifies step {step}"
        case "pause":
            return f"installs step {step}"
        case _:
            return span.name


def _format_detail(span: Span) -> str:
    match span.event:
        case SaveProgressed(bytes=written, total=total):
            return f"{written:,} of {total:,} bytes" if total else f"{written:,} bytes"
        case SaveFinished(bytes=written) | VersionPartPublished(bytes=written):
            return f"{written:,} bytes"
        case SaveFailed(error_type=error_type, message=message):
            return f"{error_type}: {message}"
        case LeaseExpired(lease=lease):
            return f"silent for {lease:g} s"
        case WeightsApplied(digest=digest) if span.category == "pause":
            return digest
        case _:
            return f"from {', '.join(span.waits_for[:_NAMED])}" if span.waits_for else ""


def _instant(entry_id: str, envelope: Envelope) -> Bar:
    at = position(entry_id)[0]
    return Bar(
        lane=format_producer(envelope.producer),
        begin=at,
        end=at,
        category=find_category(envelope.event),
        label=event_tag(envelope.event),
        entry=entry_id,
        step=find_step(envelope.event),
    )


def _outcome_instant(entry_id: str, event: StepReady | StepFailed) -> Bar:
    at, outcome = position(entry_id)[0], "ready" if isinstance(event, StepReady) else "failed"
    return Bar(
        lane="reducer-0",
        begin=at,
        end=at,
        category=READY if outcome == "ready" else FAILURE,
        label=f"{event.kind} of step {event.step} {outcome}",
        entry=entry_id,
        step=event.step,
        outcome=outcome,
        detail="" if isinstance(event, StepReady) else event.reason[:_DETAIL],
    )
