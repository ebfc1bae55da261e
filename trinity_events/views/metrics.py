"""Metrics of a run for Prometheus, by prometheus-client (extra ``metrics``).

Names have base units. Labels are bounded: kinds, types, statuses, and the first names of training
metrics; no label names a process, a step or a version.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from trinity_schemas import (
    EvaluationFinished,
    SaveFailed,
    SaveFinished,
    StepCommitted,
    StepFailed,
    StepTrained,
    VersionPartPublished,
    WeightsApplied,
    event_tag,
)

from ..core import MonitorState
from ..core.state import KINDS
from ..core.waits import open_waits
from ..log import position
from ..replay import Folded

_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 1800.0)
_METRICS = 64
"""Maximum names of training metrics; later ones are left out."""
_STATUSES = ("running", "require_sync", "stopped")


class RunMetrics:
    """Metrics of one run, in a registry of their own.

    Gauges follow from the state. Counters and histograms count the events that were folded since
    the process started.

    Args:
        run_id: The run, which is a label of every metric.
    """

    def __init__(self, run_id: str) -> None:
        self.registry = CollectorRegistry()
        self._run = run_id
        self._training: set[str] = set()
        gauge, counter = self._gauge, self._counter
        self._step = gauge("trainer_step", "Training step that the trainer has reached.")
        self._epoch = gauge("epoch", "Epoch of the run.")
        self._open = gauge("open", "1 while the run is open, 0 once it is closed.")
        self._last = gauge("last_event_timestamp_seconds", "Unix time of the last event.")
        self._ready = gauge("ready_step", "Newest ready step.", "kind")
        self._explorers = gauge("explorers", "Explorers by status.", "status")
        self._behind = gauge(
            "explorer_behind_steps_max",
            "Steps that the explorer furthest behind lacks of the ready weights.",
        )
        self._waits = gauge("open_waits", "Waits that processes have reported, and that go on.")
        self._oldest = gauge("oldest_wait_seconds", "Age of the oldest open wait.")
        self._saves = gauge("saves_under_way", "Saves by stage.", "stage")
        self._prompts = gauge("prompts", "Prompts by fate.", "fate")
        self._metric = gauge("training_metric", "Last value of a metric of training.", "name")
        self._dead = gauge("dead_letters", "Entries of the log that could not be decoded.")
        self._anomalies = gauge("anomalies", "Anomalies of the log.", "name")
        self._refused = gauge("refused_versions", "Weight versions that explorers refused.")
        self._events = counter("events", "Events and announcements.", "type")
        self._failed_saves = counter("save_failures", "Saves that failed.", "kind")
        self._failed_steps = counter("step_failures", "Kinds of steps that failed.", "kind")
        for one in KINDS:
            # A counter that begins with its first failure has not increased, for an alert.
            self._failed_saves.labels(run_id, one)
            self._failed_steps.labels(run_id, one)
        self._bytes = counter("published_bytes", "Bytes of published weights.")
        self._applied = counter("applied_bytes", "Bytes of weights that explorers applied.")
        self._durations = {
            name: self._histogram(name, told)
            for name, told in (
                ("save_seconds", "Duration of a save to files."),
                ("publish_seconds", "Time for which a publication holds a trainer rank."),
                ("fetch_seconds", "Time in which an explorer fetched and verified weights."),
                ("pause_seconds", "Time for which an installation held an explorer's engine."),
            )
        }

    def update(self, state: MonitorState, folded: Sequence[Folded], now: int) -> None:
        """Take a state, and the entries that led to it.

        Args:
            state: The run's state.
            folded: Entries since the last call.
            now: Milliseconds of the server's clock.
        """
        for one in folded:
            if one.envelope is not None:
                self._events.labels(self._run, event_tag(one.envelope.event)).inc()
                self._count(one.envelope.event)
            for announcement in one.announcements:
                self._events.labels(self._run, event_tag(announcement.event)).inc()
                if isinstance(announcement.event, StepFailed):
                    self._failed_steps.labels(self._run, announcement.event.kind).inc()
        self._show(state, now)

    def _count(self, event: object) -> None:
        run = self._run
        match event:
            case SaveFinished(seconds=seconds):
                self._durations["save_seconds"].labels(run).observe(seconds)
            case SaveFailed(slot=slot):
                self._failed_saves.labels(run, slot.kind).inc()
            case VersionPartPublished(seconds=seconds, bytes=nbytes):
                self._durations["publish_seconds"].labels(run).observe(seconds)
                self._bytes.labels(run).inc(nbytes)
            case WeightsApplied(phases=phases, bytes=nbytes):
                self._durations["fetch_seconds"].labels(run).observe(phases.fetch)
                self._durations["pause_seconds"].labels(run).observe(phases.pause)
                self._applied.labels(run).inc(nbytes)
            case StepTrained(metrics=metrics) | StepCommitted(metrics=metrics):
                self._take_metrics(metrics)
            case EvaluationFinished(name=name, metrics=metrics):
                self._take_metrics({f"eval/{name}/{one}": found for one, found in metrics.items()})
            case _:
                pass

    def _take_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name in self._training or len(self._training) < _METRICS:
                self._training.add(name)
                self._metric.labels(self._run, name).set(value)

    def _show(self, state: MonitorState, now: int) -> None:
        run = self._run
        self._step.labels(run).set(state.trainer_step)
        self._epoch.labels(run).set(state.epoch)
        self._open.labels(run).set(state.closed is None)
        self._last.labels(run).set(position(state.position)[0] / 1000)
        for kind, pointer in state.ready.items():
            self._ready.labels(run, kind).set(pointer.at.step)
        statuses = Count[str](one.status for one in state.explorers.values())
        for status in _STATUSES:
            self._explorers.labels(run, status).set(statuses[status])
        self._behind.labels(run).set(_behind(state))
        waits = open_waits(state, now)
        self._waits.labels(run).set(len(waits))
        oldest = max(0, now - waits[0].since) / 1000 if waits else 0.0
        self._oldest.labels(run).set(oldest)
        started = sum(one.started for one in state.attempts.values())
        self._saves.labels(run, "running").set(started)
        self._saves.labels(run, "waiting").set(len(state.attempts) - started)
        if state.ledger is not None:
            ledger = state.ledger
            fates = {"trained": ledger.trained, "open": ledger.open_count}
            for fate, number in (fates | {"dropped": sum(ledger.dropped.values())}).items():
                self._prompts.labels(run, fate).set(number)
        self._dead.labels(run).set(state.dead_letters)
        for name, number in state.anomaly_counts.items():
            self._anomalies.labels(run, name).set(number)
        self._refused.labels(run).set(state.refused)

    def _gauge(self, name: str, told: str, *labels: str) -> Gauge:
        return Gauge(f"trinity_{name}", told, ("run", *labels), registry=self.registry)

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        return Counter(f"trinity_{name}", told, ("run", *labels), registry=self.registry)

    def _histogram(self, name: str, told: str) -> Histogram:
        return Histogram(
            f"trinity_{name}", told, ("run",), registry=self.registry, buckets=_BUCKETS
        )


def _behind(state: MonitorState) -> int:
    """Return the steps that the explorer that is furthest behind lacks of the ready weights."""
    pointer = state.ready.get("weights")
    if pointer is None:
        return 0
    served = [
        0 if one.version is None else one.version.step
        for one in state.explorers.values()
        if one.status != "stopped"
    ]
    return max(0, pointer.at.step - min(served, default=pointer.at.step))
