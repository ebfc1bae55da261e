"""Metrics of runs for Prometheus, by prometheus-client (extra ``metrics``).

Names have base units. Labels are bounded: kinds, types, statuses, operations, and the first names
of training metrics; no label names a process, a step or a version.

The metrics of weight updates have the words of vLLM, so that one query fits both:
``vllm:rl_weight_update_operation_duration_seconds`` and
``vllm:rl_weight_update_operations_in_flight``, both with the label ``operation``
(``vllm/entrypoints/serve/dev/rlhf/metrics.py``, in later versions
``vllm/entrypoints/rl/online/metrics.py``). Its operations are the calls of its own API; ours are
those of :data:`OPERATIONS`.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

from trinity_schemas import (
    EvaluationFinished,
    PhasesMeasured,
    SaveFailed,
    SaveFinished,
    StepCommitted,
    StepFailed,
    StepTrained,
    VersionPartPublished,
    WeightsApplied,
    event_tag,
)

from ..analysis.goodput import Goodput, GoodputReader
from ..core import MonitorState
from ..core.handlers.waits import open_waits
from ..core.ordinal_ranges import count as count_ordinals
from ..core.state import KINDS
from ..log import position
from ..replay import Folded

OPERATIONS = ("publish", "fetch", "pause")
"""Operations of a weight update: of a trainer rank, and the two phases of an explorer."""
_UPDATE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600)
"""Seconds, with all bounds of vLLM's histogram: quantiles of both can be compared."""
_SAVE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300, 1800)
"""Seconds."""
_METRICS = 64
"""Maximum names of training metrics; later ones are left out."""
_STATUSES = ("running", "require_sync", "lost", "stopped")


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
        self._dropped = gauge("dropped_prompts", "Dropped prompts by reason.", "reason")
        self._metric = gauge("training_metric", "Last value of a metric of training.", "name")
        self._worker_seconds = gauge(
            "worker_seconds", "Seconds of the run's processes by fate.", "fate"
        )
        self._tokens = gauge(
            "sampled_tokens", "Sampled tokens by fate, since the metrics began.", "fate"
        )
        self._productive = gauge(
            "goodput_ratio", "Part of the ranks' and explorers' time that made gradient."
        )
        self._rate = gauge(
            "trained_tokens_per_device_second",
            "Trained tokens a second and GPU, or core without GPUs, since the metrics began.",
        )
        self._goodput = GoodputReader(run_id)
        self._dead = gauge("dead_letters", "Entries of the log that could not be decoded.")
        self._anomalies = gauge("anomalies", "Anomalies of the log.", "name")
        self._refused = gauge("refused_versions", "Weight versions that explorers refused.")
        self._alarm = gauge("alarm", "1 while an alarm is raised, 0 once it is cleared.", "alarm")
        self._alarms: set[str] = set()
        self._events = counter("events", "Events and announcements.", "type")
        self._failed_saves = counter("save_failures", "Saves that failed.", "kind")
        self._failed_steps = counter("step_failures", "Kinds of steps that failed.", "kind")
        for kind in KINDS:
            # A counter that begins with its first failure has not increased, for an alert.
            self._failed_saves.labels(run_id, kind)
            self._failed_steps.labels(run_id, kind)
        self._bytes = counter("published_bytes", "Bytes of published weights.")
        self._applied = counter("applied_bytes", "Bytes of weights that explorers applied.")
        self._save = Histogram(
            "trinity_save_seconds",
            "Duration of a save to files.",
            ("run",),
            registry=self.registry,
            buckets=_SAVE_BUCKETS,
        )
        self._operation = Histogram(
            "trinity_rl_weight_update_operation_duration_seconds",
            "Duration of an operation of a weight update: a publication holds a trainer rank, a "
            "fetch verifies the bytes, a pause holds an explorer's engine.",
            ("run", "operation"),
            registry=self.registry,
            buckets=_UPDATE_BUCKETS,
        )
        for operation in OPERATIONS:
            self._operation.labels(run_id, operation)
        self._in_flight = gauge(
            "rl_weight_update_operations_in_flight",
            "Parts that trainer ranks are publishing, and explorers that asked for weights.",
            "operation",
        )
        self._readable = gauge("run_readable", "1 while the log of the run can be read, else 0.")

    def show_unreadable(self) -> None:
        """Show that the log cannot be read, so that all other metrics are of the past."""
        self._readable.labels(self._run).set(0)

    def update(self, state: MonitorState, folded: Sequence[Folded], now: int) -> None:
        """Take a state, and the entries that led to it.

        Args:
            state: The run's state.
            folded: Entries since the last call.
            now: Milliseconds of the server's clock.
        """
        is_measured = False
        for entry in folded:
            if entry.envelope is not None:
                self._goodput.add(position(entry.entry.id)[0] / 1000, entry.envelope)
                is_measured |= isinstance(entry.envelope.event, PhasesMeasured | StepTrained)
                self._events.labels(self._run, event_tag(entry.envelope.event)).inc()
                self._count(entry.envelope.event)
            for announcement in entry.announcements:
                self._events.labels(self._run, event_tag(announcement.event)).inc()
                if isinstance(announcement.event, StepFailed):
                    self._failed_steps.labels(self._run, announcement.event.kind).inc()
        if is_measured:
            self._show_goodput(self._goodput.goodput())
        self._show(state, now)

    def _show_goodput(self, goodput: Goodput) -> None:
        run = self._run
        for fate, seconds in list(goodput.seconds.items())[:_METRICS]:
            self._worker_seconds.labels(run, fate).set(seconds)
        for fate, tokens in list(goodput.tokens.items())[:_METRICS]:
            self._tokens.labels(run, fate).set(tokens)
        self._productive.labels(run).set(goodput.productive)
        self._rate.labels(run).set(goodput.tokens_per_device_second)

    def _count(self, event: object) -> None:
        run = self._run
        match event:
            case SaveFinished(seconds=seconds):
                self._save.labels(run).observe(seconds)
            case SaveFailed(slot=slot):
                self._failed_saves.labels(run, slot.kind).inc()
            case VersionPartPublished(seconds=seconds, bytes=nbytes):
                self._operation.labels(run, "publish").observe(seconds)
                self._bytes.labels(run).inc(nbytes)
            case WeightsApplied(phases=phases, bytes=nbytes):
                self._operation.labels(run, "fetch").observe(phases.fetch)
                self._operation.labels(run, "pause").observe(phases.pause)
                self._applied.labels(run).inc(nbytes)
            case StepTrained(metrics=metrics) | StepCommitted(metrics=metrics):
                self._show_metrics(metrics)
            case EvaluationFinished(name=name, metrics=metrics):
                self._show_metrics(
                    {f"eval/{name}/{metric}": number for metric, number in metrics.items()}
                )
            case _:
                pass

    def _show_metrics(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            # A label's values must stay bounded: user metrics may have names with numbers in them.
            if name in self._training or len(self._training) < _METRICS:
                self._training.add(name)
                self._metric.labels(self._run, name).set(value)

    def _show(self, state: MonitorState, now: int) -> None:
        run = self._run
        self._step.labels(run).set(state.trainer_step)
        self._epoch.labels(run).set(state.epoch)
        self._open.labels(run).set(state.closed is None)
        # By the entry's id: the server's clock is one for all processes.
        self._last.labels(run).set(position(state.position)[0] / 1000)
        for kind, pointer in state.ready.items():
            self._ready.labels(run, kind).set(pointer.at.step)
        statuses = Count[str](explorer.shown_status for explorer in state.explorers.values())
        for status in _STATUSES:
            self._explorers.labels(run, status).set(statuses[status])
        # The state has no statuses of explorers beyond its limit, only their ranks.
        unlisted = count_ordinals(state.unlisted_explorers)
        if unlisted:
            self._explorers.labels(run, "unlisted").set(unlisted)
        self._behind.labels(run).set(_behind(state))
        waits = open_waits(state, now)
        self._waits.labels(run).set(len(waits))
        oldest = max(0, now - waits[0].since) / 1000 if waits else 0.0
        self._oldest.labels(run).set(oldest)
        started = sum(attempt.started for attempt in state.attempts.values())
        self._saves.labels(run, "running").set(started)
        self._saves.labels(run, "waiting").set(len(state.attempts) - started)
        if state.ledger is not None:
            ledger = state.ledger
            fates = {"trained": ledger.trained, "open": ledger.open_count}
            for fate, number in (fates | {"dropped": sum(ledger.dropped.values())}).items():
                self._prompts.labels(run, fate).set(number)
            for reason, number in ledger.dropped.items():
                self._dropped.labels(run, reason).set(number)
        self._dead.labels(run).set(state.dead_letters)
        for name, number in state.anomaly_counts.items():
            self._anomalies.labels(run, name).set(number)
        # An alarm that was cleared stays at 0: a rule on a missing series never resolves in time.
        self._alarms |= state.alarms.keys()
        for name in self._alarms:
            self._alarm.labels(run, name).set(name in state.alarms)
        self._refused.labels(run).set(state.refused)
        self._in_flight.labels(run, "publish").set(_unpublished(state))
        requesters = [
            explorer for explorer in state.explorers.values() if explorer.requested_at is not None
        ]
        # Only those that run: one that was lost in its request would count for ever.
        waiting = sum(explorer.runs for explorer in requesters)
        self._in_flight.labels(run, "fetch").set(waiting)
        self._readable.labels(run).set(1)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(f"trinity_{name}", help_text, ("run", *labels), registry=self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"trinity_{name}", help_text, ("run", *labels), registry=self.registry)


def _behind(state: MonitorState) -> int:
    """Return the steps that the explorer that is furthest behind lacks of the ready weights."""
    pointer = state.ready.get("weights")
    if pointer is None:
        return 0
    served = [
        0 if explorer.version is None else explorer.version.step
        for explorer in state.explorers.values()
        if explorer.runs
    ]
    # Without an explorer that runs, none is behind.
    return max(0, pointer.at.step - min(served, default=pointer.at.step))


def _unpublished(state: MonitorState) -> int:
    """Return the parts that open weight versions lack; none once the run is closed."""
    if state.closed is not None:
        return 0
    count = 0
    for step in state.steps.values():
        kind = step.kinds.get("weights")
        # Of a settled version, parts that never came are not in flight.
        if step.version is not None and (kind is None or not kind.settled):
            count += len(step.version.ranks) - len(step.version.parts)
    return count


class ServerMetrics:
    """Metrics of the runs of a server: their registries, joined anew at each scrape.

    A run that is dropped takes its series with it.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._own = CollectorRegistry()
        self._up = Gauge(
            "trinity_server_up",
            "1 while the server of the log answers, else 0: metrics of runs are of the past.",
            registry=self._own,
        )
        self._left_out = Gauge(
            "trinity_runs_left_out",
            "Open runs without metrics, since newer runs take all places.",
            registry=self._own,
        )
        self._runs: dict[str, RunMetrics] = {}

    @property
    def runs(self) -> tuple[str, ...]:
        """Runs with metrics."""
        return tuple(self._runs)

    def add(self, run_id: str) -> RunMetrics:
        """Add a run; return its metrics."""
        # A new dictionary each time: a scrape reads the old one in a thread of its own.
        self._runs = self._runs | {run_id: RunMetrics(run_id)}
        return self._runs[run_id]

    def drop(self, run_id: str) -> None:
        """Drop the metrics of a run."""
        self._runs = {name: metrics for name, metrics in self._runs.items() if name != run_id}

    def show_server(self, *, up: bool) -> None:
        """Show whether the server answers."""
        self._up.set(up)

    def show_left_out(self, runs: int) -> None:
        """Show the number of runs that have no metrics."""
        self._left_out.set(runs)

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once, with the samples of all runs."""
        # A format of one registry has each name once; collect() makes new objects, which may grow.
        metrics_by_name: dict[str, Metric] = {}
        for registry in (self._own, *(metrics.registry for metrics in self._runs.values())):
            for metric in registry.collect():
                first = metrics_by_name.setdefault(metric.name, metric)
                if first is not metric:
                    first.samples.extend(metric.samples)
        yield from metrics_by_name.values()
