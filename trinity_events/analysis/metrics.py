"""Metrics of a run by step, under the names that trackers and plots have in common."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from trinity_schemas import (
    Envelope,
    EvaluationFinished,
    LeaseExpired,
    PhasesMeasured,
    RunClosed,
    RunOpened,
    RunResumed,
    StepCommitted,
    StepRef,
    StepTrained,
    VersionOpened,
    VersionPartPublished,
    WeightsApplied,
)

from ..core.ordinal_ranges import count
from .goodput import Goodput, GoodputReader
from .transfers import FirstApplications

GROUPS = ("train", "rollout", "eval", "perf", "off_policy")
"""Groups of metrics; a metric's name is ``GROUP/NAME``."""
MEASURED = (
    *(RunOpened, RunResumed, RunClosed, LeaseExpired, PhasesMeasured),
    StepTrained,
    VersionOpened,
    VersionPartPublished,
    StepCommitted,
    WeightsApplied,
    EvaluationFinished,
)
"""Types of the events that tell metrics."""
_OF_ROLLOUTS = frozenset({"reward", "reward_std", "score", "rollout_entropy"})
_GROUPS_OF_ROLLOUTS = ("response_", "reward_parts/")
_OFF_POLICY = ("rollout_corr/", "staleness", "mixed_versions")
_OPENED = 64
"""Versions whose opening is remembered, for explorers that apply them late."""


class StepMetrics(Struct, frozen=True):
    """Metrics that one event tells of a step."""

    epoch: int
    step: int
    occurred_at: float
    """Unix time in seconds, by the producer's clock."""
    values: dict[str, float]
    """Metrics by ``GROUP/NAME``; a name that ends in ``_seconds`` or ``_bytes`` has that unit."""


class MetricsReader:
    """Reader of a run's metrics; it takes events in the order of the log.

    Times by version are those of the slowest rank, and of each explorer that applied it.
    """

    def __init__(self) -> None:
        self._trained_at: tuple[int, float] | None = None
        """Epoch and time of the last event of a trained step."""
        self._parts: dict[StepRef, list[VersionPartPublished]] = {}
        self._opened: dict[StepRef, float] = {}
        self._first_applications = FirstApplications()
        self._goodput = GoodputReader()

    def add(self, envelope: Envelope) -> StepMetrics | None:
        """Take an event; return the metrics that it tells, if it tells any."""
        event, epoch = envelope.event, envelope.epoch
        # By the senders' clocks, as all times here.
        self._goodput.add(envelope.occurred_at, envelope)
        match event:
            case StepTrained(step=step):
                values = self._trained(envelope, event) | _measure_goodput(self._goodput.goodput())
                return self._build(envelope, step, values)
            case VersionPartPublished(step=step):
                self._parts.setdefault(StepRef(epoch, step), []).append(event)
            case StepCommitted(step=step):
                values = self._committed(epoch, event) | self._published(StepRef(epoch, step))
                return self._build(envelope, step, values)
            case VersionOpened(step=step):
                self._opened[StepRef(epoch, step)] = envelope.occurred_at
            case WeightsApplied(version=version):
                return self._build(envelope, version.step, self._applied(envelope, event))
            case EvaluationFinished(version=version):
                return self._build(envelope, version.step, _evaluated(event))
            case _:
                pass
        return None

    def _build(self, envelope: Envelope, step: int, values: dict[str, float]) -> StepMetrics | None:
        if not values:
            return None
        return StepMetrics(envelope.epoch, step, envelope.occurred_at, values)

    def _trained(self, envelope: Envelope, event: StepTrained) -> dict[str, float]:
        values = {format_metric_name(name): value for name, value in event.metrics.items()}
        values |= _staleness(event.staleness)
        if dropped := sum(map(count, event.dropped.values())):
            values["rollout/dropped_prompts"] = float(dropped)
        now = envelope.occurred_at
        # Of one epoch alone: a run that was resumed after days had no step that long.
        if self._trained_at is not None and self._trained_at[0] == envelope.epoch:
            values["perf/step_seconds"] = max(0.0, now - self._trained_at[1])
        self._trained_at = envelope.epoch, now
        return values

    def _committed(self, epoch: int, event: StepCommitted) -> dict[str, float]:
        """Return the metrics of a commit, unless the trainer of its epoch reports its steps.

        A loop without rollouts from this log has no other event for them.
        """
        if self._trained_at is not None and self._trained_at[0] == epoch:
            return {}
        return {format_metric_name(name): value for name, value in event.metrics.items()}

    def _published(self, version: StepRef) -> dict[str, float]:
        parts = self._parts.pop(version, [])
        for older in [key for key in self._parts if key < version]:
            del self._parts[older]  # which was never committed
        for older in list(self._opened)[:-_OPENED]:
            del self._opened[older]
        if not parts:
            return {}
        return {
            "perf/stall_seconds": max(part.seconds for part in parts),
            "perf/published_bytes": float(sum(part.bytes for part in parts)),
        }

    def _applied(self, envelope: Envelope, event: WeightsApplied) -> dict[str, float]:
        values = {"perf/pause_seconds": event.phases.pause}
        opened = self._opened.get(event.version)
        if self._first_applications.add(envelope, event) and opened is not None:
            values["perf/transfer_seconds"] = max(0.0, event.verified_at - opened)
        return values


def format_metric_name(name: str) -> str:
    """Return a trainer's metric as ``GROUP/NAME``; a name that has a group keeps it."""
    if name.split("/", 1)[0] in GROUPS:
        return name
    if name.startswith(_OFF_POLICY):
        # As veRL's metrics of rollout correction, without their prefix.
        return f"off_policy/{name.removeprefix('rollout_corr/')}"
    is_of_rollouts = name in _OF_ROLLOUTS or name.startswith(_GROUPS_OF_ROLLOUTS)
    return f"rollout/{name}" if is_of_rollouts else f"train/{name}"


def _evaluated(event: EvaluationFinished) -> dict[str, float]:
    """Return the results of a set as ``eval/SET/NAME``."""
    named = {f"eval/{event.name}/{name}": value for name, value in event.metrics.items()}
    return named | {f"eval/{event.name}/seconds": event.seconds}


def _measure_goodput(goodput: Goodput) -> dict[str, float]:
    """Return goodput, and rates by device, of a run whose processes report their phases."""
    if not goodput.workers:
        return {}
    return {
        "perf/goodput": goodput.productive,
        "perf/trained_token_share": goodput.trained_tokens,
        f"perf/tokens_per_second_per_{goodput.device.lower()}": goodput.tokens_per_device_second,
        f"perf/samples_per_second_per_{goodput.device.lower()}": goodput.samples_per_device_second,
    }


def _staleness(samples: Mapping[int, int]) -> dict[str, float]:
    """Return mean and maximum of the staleness of a step's samples, in optimizer steps."""
    number = sum(samples.values())
    if not number:
        return {}
    mean = sum(staleness * times for staleness, times in samples.items()) / number
    return {"off_policy/staleness": mean, "off_policy/staleness_max": float(max(samples))}
