"""Timeline of a run: spans, moments and counters, computed from its log alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct, field

from trinity_schemas import (
    ANNOUNCEMENT_TYPES,
    Envelope,
    Event,
    LeaseExpired,
    RunClosed,
    RunResumed,
    SaveFailed,
    SaveFinished,
    SaveProgressed,
    SaveRequested,
    SaveStarted,
    Slot,
    StepCommitted,
    StepReady,
    StepRef,
    StepTrained,
    Trace,
    VersionOpened,
    VersionPartPublished,
    WaitEnded,
    WaitStarted,
    WeightsApplied,
    event_tag,
)

from ..core.fold_state import format_producer
from ..core.limits import KEPT_STEPS_AT_MOST, KEPT_UNDER_WAY, KEPT_WAITS

_COUNTERS = 64
"""Maximum counters of metrics; further names are left out."""

Category = Literal["save", "publish", "version", "fetch", "pause", "wait", "train"]


class Span(Struct, frozen=True, kw_only=True):
    """Part of a timeline with a begin and an end, in nanoseconds."""

    process: str
    """Role and rank of the process."""
    lane: str
    """Track of the process, on which spans do not overlap."""
    name: str
    category: Category
    begin: int
    end: int
    facts: dict[str, str | int] = field(default_factory=dict)
    flows: tuple[int, ...] = ()
    """Flows that begin in the span."""
    flow_end: int | None = None
    """Flow that ends in the span."""
    step: StepRef | None = None
    """Step that the span is of."""
    trace: Trace | None = None
    """Trace context of the event that ends the span, if it sent one."""


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


class _Begun(Struct):
    process: str
    lane: str
    name: str
    category: Category
    begin: int
    facts: dict[str, str | int] = field(default_factory=dict)
    flows: list[int] = field(default_factory=list)
    step: StepRef | None = None


_IN_SPANS = (
    *(SaveRequested, SaveStarted, SaveProgressed, SaveFinished),
    *(VersionPartPublished, WaitStarted),
)
"""Events that a span tells."""


def _facts(event: Event) -> dict[str, str | int]:
    """Return what the moment of an event shows beside its name."""
    if not isinstance(event, RunResumed):
        return {}
    facts: dict[str, str | int] = {
        f"skipped step {skipped.step}": skipped.reason for skipped in event.skipped
    }
    return facts | {change.name: f"{change.before} -> {change.after}" for change in event.changed}


class Timeline:
    """Builder of a timeline from entries in the order of their ids.

    Times are those of the entries, so that one clock counts for all processes; durations are those
    that processes measured. A version's span ends when its weights are ready; a flow goes from it
    to each application of the version.
    """

    def __init__(self) -> None:
        self._saves: dict[str, _Begun] = {}
        self._waits: dict[str, _Begun] = {}
        self._versions: dict[StepRef, _Begun] = {}
        self._ready: dict[StepRef, tuple[_Begun, int]] = {}
        self._trained: dict[str, int] = {}
        self._counters: set[str] = set()
        self._flows = 0
        self._published = 0
        self._last = 0

    def add(self, entry_id: str, envelope: Envelope) -> Iterator[Part]:
        """Yield what an entry ends or tells."""
        now = int(entry_id.partition("-")[0]) * 1_000_000
        self._last = max(self._last, now)
        by, event = format_producer(envelope.producer), envelope.event
        yield from self._attempt(envelope.epoch, event, by, now)
        yield from self._version(envelope, event, by, now)
        match event:
            case WaitEnded(wait_id=name) if name in self._waits:
                yield self._end(self._waits.pop(name), now, {"outcome": event.outcome})
            case WaitStarted(wait_id=name):
                self._wait(name, event, by, now)
            case StepTrained() | StepCommitted():
                yield from self._step(envelope.epoch, event, by, now)
            case _:
                pass
        if not isinstance(event, _IN_SPANS):
            who = "announcements" if isinstance(event, ANNOUNCEMENT_TYPES) else by
            yield Moment(process=who, name=_title(event), at=now, facts=_facts(event))
        if isinstance(event, RunClosed):
            yield from self._close("the run was closed")

    def finish(self) -> Iterator[Part]:
        """Yield what the log does not end."""
        yield from self._close("under way at the end of the log")

    def _attempt(self, epoch: int, event: Event, by: str, now: int) -> Iterator[Span]:
        """Yield the span of an attempt that an event ends; note one that it begins."""
        match event:
            case SaveStarted(save_id=name):
                self._begin_save(name, by, event.slot, now, epoch)
            case SaveFinished(save_id=name):
                yield self._end_save(name, by, event.slot, now, epoch, event.seconds)
            case SaveFailed(save_id=name):
                failed = f"failed: {event.message}"
                yield self._end_save(name, by, event.slot, now, epoch, outcome=failed)
            case LeaseExpired(attempts=attempts, holder=holder):
                for attempt in attempts:
                    who = format_producer(holder)
                    expired = "lease expired"
                    yield self._end_save(
                        attempt.save_id, who, attempt.slot, now, epoch, outcome=expired
                    )
            case _:
                pass

    def _version(self, envelope: Envelope, event: Event, by: str, now: int) -> Iterator[Part]:
        """Yield the spans of a weight version's parts and applications."""
        match event:
            case VersionOpened(step=step):
                self._open_version(StepRef(envelope.epoch, step), now)
            case VersionPartPublished():
                yield self._part(envelope, event, by, now)
                self._published += event.bytes
                yield Value(counter="published bytes", at=now, value=self._published)
            case StepReady(kind="weights"):
                self._make_ready(StepRef(event.epoch, event.step), now)
            case WeightsApplied():
                yield from self._applied(envelope, event, by, now)
            case _:
                pass

    def _close(self, why: str) -> Iterator[Part]:
        for begun in (self._saves, self._waits, self._versions):
            for open_part in begun.values():
                yield self._end(open_part, self._last, {"outcome": why})
            begun.clear()
        for version, end in self._ready.values():
            yield self._end(version, end, {})
        self._ready.clear()

    def _end(
        self, begun: _Begun, end: int, facts: dict[str, str | int], trace: Trace | None = None
    ) -> Span:
        return Span(
            process=begun.process,
            lane=begun.lane,
            name=begun.name,
            category=begun.category,
            begin=min(begun.begin, end),
            end=end,
            facts=begun.facts | facts,
            flows=tuple(begun.flows),
            step=begun.step,
            trace=trace,
        )

    def _begin_save(self, name: str, by: str, slot: Slot, begin: int, epoch: int) -> _Begun:
        begun = _Begun(
            by,
            f"{slot.name} {name}",
            f"{slot.kind} step {slot.step}",
            "publish" if slot.kind == "weights" else "save",
            begin,
            {"step": slot.step, "kind": slot.kind, "save_id": name},
            step=StepRef(epoch, slot.step),
        )
        self._saves[name] = begun
        if len(self._saves) > KEPT_UNDER_WAY:
            del self._saves[next(iter(self._saves))]
        return begun

    def _end_save(
        self,
        name: str,
        by: str,
        slot: Slot,
        end: int,
        epoch: int,
        seconds: float = 0.0,
        outcome: str = "finished",
    ) -> Span:
        begun = self._saves.get(name)
        if begun is None:  # its start is not in the log
            begun = self._begin_save(name, by, slot, end - int(seconds * 1e9), epoch)
        del self._saves[name]
        return self._end(begun, end, {"outcome": outcome})

    def _part(self, envelope: Envelope, event: VersionPartPublished, by: str, now: int) -> Span:
        name = event.save_id
        begun = self._saves.pop(name, None) if name is not None else None
        if begun is None:
            begin = now - int(event.seconds * 1e9)
            label = f"weights step {event.step}"
            begun = _Begun(by, f"part {event.step}.{event.rank}", label, "publish", begin)
            begun.step = StepRef(envelope.epoch, event.step)
        facts: dict[str, str | int] = {"bytes": event.bytes, "digest": event.manifest_digest}
        return self._end(begun, now, facts | {"outcome": "finished"}, envelope.trace)

    def _open_version(self, version: StepRef, now: int) -> None:
        label = f"version {version.epoch}/{version.step}"
        begun = _Begun("versions", label, label, "version", now, step=version)
        self._versions[version] = begun
        if len(self._versions) > KEPT_STEPS_AT_MOST:
            del self._versions[next(iter(self._versions))]

    def _make_ready(self, version: StepRef, now: int) -> None:
        begun = self._versions.pop(version, None)
        if begun is None:
            label = f"version {version.epoch}/{version.step}"
            begun = _Begun("versions", label, label, "version", now, step=version)
        # It stays open for the flows to its applications, which the log has later.
        self._ready[version] = begun, now

    def _applied(
        self, envelope: Envelope, event: WeightsApplied, by: str, now: int
    ) -> Iterator[Span]:
        version = event.version
        label = f"version {version.epoch}/{version.step}"
        pause = int(event.phases.pause * 1e9)
        fetched = min(int(event.verified_at * 1e9), now - pause)
        fetch = fetched - int(event.phases.fetch * 1e9)
        flow = None
        if version in self._ready:
            self._flows += 1
            flow = self._flows
            self._ready[version][0].flows.append(flow)
        yield Span(
            process=by,
            lane="fetch",
            name=label,
            category="fetch",
            begin=fetch,
            end=fetched,
            facts={"bytes": event.bytes, "digest": event.digest},
            step=version,
        )
        yield Span(
            process=by,
            lane="pause",
            name=label,
            category="pause",
            begin=now - pause,
            end=now,
            flow_end=flow,
            step=version,
            trace=envelope.trace,
        )

    def _wait(self, name: str, event: WaitStarted, by: str, now: int) -> None:
        if name in self._waits:
            return
        label = f"waits for {event.what}"
        begun = _Begun(by, f"wait {name}", label, "wait", now - int(event.seconds * 1e9))
        begun.facts["for"] = ", ".join(event.waits_for[:16])
        self._waits[name] = begun
        if len(self._waits) > KEPT_WAITS:
            del self._waits[next(iter(self._waits))]

    def _step(
        self, epoch: int, event: StepTrained | StepCommitted, by: str, now: int
    ) -> Iterator[Part]:
        if isinstance(event, StepTrained):
            if by in self._trained:
                yield Span(
                    process=by,
                    lane="steps",
                    name=f"step {event.step}",
                    category="train",
                    begin=self._trained[by],
                    end=now,
                    step=StepRef(epoch, event.step),
                )
            self._trained[by] = now
            yield Value(counter="step", at=now, value=event.step)
        for name, value in event.metrics.items():
            if name in self._counters or len(self._counters) < _COUNTERS:
                self._counters.add(name)
                yield Value(counter=name, at=now, value=value)


def _title(event: Struct) -> str:
    """Return the type of an event, with its step and kind."""
    step = getattr(event, "step", None)
    kind = getattr(event, "kind", None)
    about = [event_tag(event), *([str(kind)] if kind else []), *([str(step)] if step else [])]
    return " ".join(about)
