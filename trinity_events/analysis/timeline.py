"""Timeline of a run: spans, moments and counters, computed from its log alone."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, field

from trinity_schemas import (
    ANNOUNCEMENT_TYPES,
    Envelope,
    Event,
    RunClosed,
    RunResumed,
    SaveFinished,
    SaveProgressed,
    SaveRequested,
    SaveStarted,
    StepCommitted,
    StepReady,
    StepRef,
    StepTrained,
    VersionOpened,
    VersionPartPublished,
    WaitStarted,
    event_tag,
)

from ..core.fold_state import format_producer, trim_oldest
from ..core.limits import KEPT_STEPS_AT_MOST
from .spans import Span, SpanBuilder, entry_time

_COUNTERS = 64
"""Maximum counters of metrics; further names are left out."""


class Moment(Struct, frozen=True, kw_only=True):
    """Event without a duration."""

    process: str
    name: str
    at: int
    facts: dict[str, str | int] = field(default_factory=dict)


class Value(Struct, frozen=True, kw_only=True):
    """Value of a counter from a moment on."""

    counter: str
    at: int
    value: float


Part = Span | Moment | Value


_IN_SPANS = (
    *(SaveRequested, SaveStarted, SaveProgressed, SaveFinished),
    *(VersionPartPublished, WaitStarted),
)
"""Events without a moment, since their spans show them."""


def _facts(event: Event) -> dict[str, str | int]:
    """Return what the moment of an event shows in addition to its name."""
    if not isinstance(event, RunResumed):
        return {}
    facts: dict[str, str | int] = {
        f"skipped step {skipped.step}": skipped.reason for skipped in event.skipped
    }
    return facts | {change.name: f"{change.before} -> {change.after}" for change in event.changed}


class Timeline:
    """Builder of a timeline from entries in the order of their ids.

    A version's span ends when its weights are ready; a flow goes from it to each application of
    the version.
    """

    def __init__(self) -> None:
        self._spans = SpanBuilder()
        self._versions: dict[StepRef, Span] = {}
        self._ready: dict[StepRef, Span] = {}
        """Versions whose flows to applications may still be in later entries."""
        self._counters: set[str] = set()
        self._flows = 0
        self._published = 0
        self._last = 0

    def add(self, entry_id: str, envelope: Envelope) -> Iterator[Part]:
        """Yield the spans that an entry ends, its moment and its values."""
        now, event = entry_time(entry_id), envelope.event
        self._last = max(self._last, now)
        for span in self._spans.add(entry_id, envelope):
            if span.category == "pause" and span.step in self._ready:
                self._flows += 1
                span.flow_end = self._flows
                self._ready[span.step].flows.append(self._flows)
            # The first step of a process has no begin.
            if span.category != "train" or span.has_start:
                yield span
        yield from self._values(event, now)
        self._follow_version(entry_id, envelope.epoch, event)
        if not isinstance(event, _IN_SPANS):
            is_announcement = isinstance(event, ANNOUNCEMENT_TYPES)
            process = "announcements" if is_announcement else format_producer(envelope.producer)
            yield Moment(process=process, name=_title(event), at=now, facts=_facts(event))
        # A later epoch begins with no open span.
        if isinstance(event, RunClosed):
            yield from self._end_open("the run was closed")

    def finish(self) -> Iterator[Part]:
        """Yield the spans that the log does not end."""
        yield from self._end_open("under way at the end of the log")

    def _end_open(self, outcome: str) -> Iterator[Span]:
        yield from self._spans.finish(self._last, outcome)
        for version in self._versions.values():
            version.end = self._last
            version.facts["outcome"] = outcome
            yield version
        # Only now: a span that was written can get no more flows.
        yield from self._ready.values()
        self._versions, self._ready = {}, {}

    def _follow_version(self, entry_id: str, epoch: int, event: Event) -> None:
        """Open the span of a version, or end it: it stays open for flows to its applications."""
        match event:
            case VersionOpened(step=step):
                version = StepRef(epoch, step)
                self._versions[version] = _version_span(entry_id, version)
                # Versions that never became ready would else stay.
                trim_oldest(self._versions, KEPT_STEPS_AT_MOST)
            case StepReady(kind="weights"):
                version = StepRef(event.epoch, event.step)
                if version not in self._versions:
                    self._versions[version] = _version_span(entry_id, version)
                self._ready[version] = self._versions.pop(version)
                self._ready[version].end = entry_time(entry_id)
            case _:
                pass

    def _values(self, event: Event, now: int) -> Iterator[Value]:
        """Yield the values of counters that an event reports."""
        if isinstance(event, VersionPartPublished):
            self._published += event.bytes
            yield Value(counter="published bytes", at=now, value=self._published)
        if isinstance(event, StepTrained):
            yield Value(counter="step", at=now, value=event.step)
        if isinstance(event, StepTrained | StepCommitted):
            for name, value in event.metrics.items():
                # Each counter is a track, and names may come from users.
                if name in self._counters or len(self._counters) < _COUNTERS:
                    self._counters.add(name)
                    yield Value(counter=name, at=now, value=value)


def _version_span(entry_id: str, version: StepRef) -> Span:
    name, at = f"version {version.epoch}/{version.step}", entry_time(entry_id)
    return Span(
        process="versions",
        lane=name,
        name=name,
        category="version",
        begin=at,
        end=at,
        entry=entry_id,
        step=version,
    )


def _title(event: Struct) -> str:
    """Return the type of an event, with its step and kind."""
    step = getattr(event, "step", None)
    kind = getattr(event, "kind", None)
    about = [event_tag(event), *([str(kind)] if kind else []), *([str(step)] if step else [])]
    return " ".join(about)
