"""Figures of a run by step and by version, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field

from trinity_schemas import (
    Envelope,
    EvaluationFinished,
    StepCommitted,
    StepReady,
    StepRef,
    StepTrained,
    VersionOpened,
    VersionPartPublished,
    VersionRefused,
    WeightsApplied,
    WeightsProof,
)

from ..analysis.goodput import GoodputReader
from ..core.fold_state import format_producer, trim_oldest

POINTS = 1024
"""Maximum points of one series; beyond it neighbours become one."""
METRICS = 64
"""Maximum metrics of one run; later names are left out."""
VERSIONS = 64
"""Versions for which each explorer's digest is kept."""


class Series:
    """Points by step; a longer series has the mean of neighbours in each point."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int, float]] = []
        """Epoch, step, value."""
        self._stride = 1
        self._pending: list[tuple[int, int, float]] = []

    def add(self, epoch: int, step: int, value: float) -> None:
        """Add a point; a value that is no number is left out."""
        # JSON has neither NaN nor infinity, and a mean would take them up.
        if not math.isfinite(value):
            return
        self._pending.append((epoch, step, value))
        if len(self._pending) >= self._stride:
            self._points.append(_mean(self._pending))
            self._pending.clear()
        # Pairs become one point, and from now on twice as many values make one. POINTS is even,
        # so that the newest has a pair too.
        if len(self._points) >= POINTS:
            self._stride *= 2
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [_mean(list(pair)) for pair in pairs]

    def raise_to(self, epoch: int, step: int, value: float) -> None:
        """Add a point, or raise the last one if it is of this step: it shows the slowest."""
        # A version's applications come one by one: the slowest explorer so far is shown.
        for points in (self._pending, self._points):
            if points and points[-1][:2] == (epoch, step):
                points[-1] = (epoch, step, max(points[-1][2], value))
                return
        self.add(epoch, step, value)

    def points(self) -> list[tuple[int, int, float]]:
        """Return the points, each with epoch, step and value."""
        return [*self._points, *([_mean(self._pending)] if self._pending else [])]


def sample(points: list[tuple[int, int, float]], most: int) -> list[tuple[int, int, float]]:
    """Return at most some points, each the mean of neighbours, the newest at its step."""
    size = -(-len(points) // most) if points else 1
    # From the end, so that the newest points are full.
    starts = range(len(points) % size - size if len(points) % size else 0, len(points), size)
    return [_mean(points[max(0, start) : start + size]) for start in starts]


def _mean(points: list[tuple[int, int, float]]) -> tuple[int, int, float]:
    epoch, step, _ = points[-1]
    # At the step of the last value: the curve ends where the run is.
    return epoch, step, math.fsum(value for _, _, value in points) / len(points)


class Applied(Struct, frozen=True):
    """Application of one version by one explorer."""

    digest: str
    at: float
    fetch: float
    pause: float
    proof: WeightsProof | None = None
    """Checks that it passed before it was served, if the explorer reported any."""


class Refused(Struct, frozen=True):
    """Refusal of one version by one explorer."""

    reason: str
    at: float


class Version(Struct):
    """Weight version, with its times and the explorers that applied or refused it."""

    ref: StepRef
    opened: float = 0.0
    transport: str = ""
    parts: int = 0
    bytes: int = 0
    stall: float = 0.0
    ready_at: float = 0.0
    digest: str = ""
    applied: dict[str, Applied] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)


class Figures:
    """Collector of a run's series; it takes events and announcements in the order of the log."""

    def __init__(self) -> None:
        self.metrics: dict[str, Series] = {}
        self.times: dict[str, Series] = {name: Series() for name in ("stall", "transfer", "pause")}
        """Seconds by version, of the slowest rank or explorer."""
        self.staleness: dict[int, int] = {}
        """Staleness in steps to the number of trained samples."""
        self.versions: dict[StepRef, Version] = {}
        """Last versions, oldest first."""
        self.goodput = GoodputReader()

    def add(self, at: float, envelope: Envelope) -> None:
        """Take an event or an announcement, ``at`` in seconds by the server's clock."""
        self.goodput.add(at, envelope)
        add = _ADDERS.get(type(envelope.event))
        if add is not None:
            add(self, at, envelope, envelope.event)

    def _metrics(self, _: float, envelope: Envelope, event: StepTrained | StepCommitted) -> None:
        self._add_metrics(StepRef(envelope.epoch, event.step), event.metrics)

    def _evaluated(self, _: float, __: Envelope, event: EvaluationFinished) -> None:
        metrics = {f"eval/{event.name}/{name}": value for name, value in event.metrics.items()}
        self._add_metrics(event.version, metrics)

    def _add_metrics(self, at: StepRef, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            series = self.metrics.get(name)
            if series is None:
                if len(self.metrics) >= METRICS:
                    continue
                series = self.metrics[name] = Series()
            series.add(at.epoch, at.step, value)

    def _trained(self, at: float, envelope: Envelope, event: StepTrained) -> None:
        self._metrics(at, envelope, event)
        for staleness, samples in event.staleness.items():
            # Bounded: the last bucket has all that are later.
            bucket = min(staleness, 64)
            self.staleness[bucket] = self.staleness.get(bucket, 0) + samples

    def _opened(self, at: float, envelope: Envelope, event: VersionOpened) -> None:
        version = self._version(StepRef(envelope.epoch, event.step))
        version.opened, version.transport = at, event.transport

    def _part(self, _: float, envelope: Envelope, event: VersionPartPublished) -> None:
        version = self._version(StepRef(envelope.epoch, event.step))
        version.parts += 1
        version.bytes += event.bytes
        version.stall = max(version.stall, event.seconds)

    def _ready(self, at: float, _: Envelope, event: StepReady) -> None:
        if event.kind != "weights":
            return
        version = self._version(StepRef(event.epoch, event.step))
        version.ready_at, version.digest = at, event.version_digest or ""
        # Once its version is ready, when the parts of all ranks are known.
        self.times["stall"].add(event.epoch, event.step, version.stall)

    def _applied(self, at: float, envelope: Envelope, event: WeightsApplied) -> None:
        ref, phases = event.version, event.phases
        version = self._version(ref)
        name = format_producer(envelope.producer)
        version.applied[name] = Applied(event.digest, at, phases.fetch, phases.pause, event.proof)
        if version.opened:
            seconds = max(0.0, event.verified_at - version.opened)
            self.times["transfer"].raise_to(ref.epoch, ref.step, seconds)
        self.times["pause"].raise_to(ref.epoch, ref.step, phases.pause)

    def _refused(self, at: float, envelope: Envelope, event: VersionRefused) -> None:
        version = self._version(event.version)
        version.refused[format_producer(envelope.producer)] = Refused(event.reason[:200], at)

    def _version(self, ref: StepRef) -> Version:
        version = self.versions.get(ref)
        if version is None:
            version = self.versions[ref] = Version(ref)
            trim_oldest(self.versions, VERSIONS)
        return version


_ADDERS: dict[type, Callable[[Figures, float, Envelope, Any], None]] = {
    StepTrained: Figures._trained,
    StepCommitted: Figures._metrics,
    EvaluationFinished: Figures._evaluated,
    VersionOpened: Figures._opened,
    VersionPartPublished: Figures._part,
    StepReady: Figures._ready,
    WeightsApplied: Figures._applied,
    VersionRefused: Figures._refused,
}
