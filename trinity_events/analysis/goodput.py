"""Goodput of a run: the fate of every worker-second and of every sampled token, by the log alone.

1. Seconds are those that processes measured (``phases-measured``), each in one phase. What a dead
   process did after its last report is ``lost``, and the time without it is ``down``.
2. Fates of all worker-seconds add up to the time of all workers, and fates of tokens to all tokens.
3. A token has the fate of the current lineage: what a resume discards is lost, not trained.
4. A signal ends all processes of a run, some without a last report: none of them has died.
5. The result follows from the entries and one time, which stands for now in an open run.

Left out: computing time of ranks is not told from their waits in collectives, so a slow rank
shows in its publications and saves alone. Saves in threads beside the training are no phase.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple

from msgspec import Struct, field, structs

from trinity_schemas import (
    REPORTER_ROLE,
    Envelope,
    Event,
    LeaseExpired,
    PhasesMeasured,
    Producer,
    RunClosed,
    RunOpened,
    RunResumed,
    SaveFinished,
    StepTrained,
    VersionPartPublished,
    WeightsApplied,
)

from ..core.fold_state import format_producer, trim_oldest
from ..core.limits import KEPT_PRODUCERS
from ..diagnostics.phase_names import (
    CHUNK_SERVER_ROLE,
    LOG_SERVER_ROLE,
    SERVING,
    STANDBY_ROLE,
    STANDING_BY,
    WAITING_SAMPLES,
    find_pause,
)
from .transfers import FirstApplications

PRODUCTIVE = ("training", "generating", "judging", "environment")
"""Phases that make gradient."""
RECOMPUTING, LOST, DOWN, TAIL = "recomputing", "lost", "down", "waiting-tail"
FATES = (
    *PRODUCTIVE,
    *("evaluating", "installing", "publishing", "saving", "folding", "writing", SERVING),
    *("waiting-rollouts", TAIL, "waiting-weights", "waiting-requests", "waiting-evaluation"),
    *("waiting-trainer", WAITING_SAMPLES, STANDING_BY, "idle", "starting"),
    *(RECOMPUTING, LOST, DOWN),
)
"""Fates of worker-seconds, in the order of tables; phases of a user's own follow."""
TOKEN_FATES = (
    *("trained", "evaluated", "stale", "filtered", "surplus", "failed", "aborted", "malformed"),
    *("excluded", "lost", "open"),
)
"""Fates of tokens, in the order of tables; further reasons to drop a prompt follow."""
_KEPT = "kept"
"""Not a fate: tokens of answers that a resumed epoch keeps of an earlier one."""
_SAMPLED, _ANSWERED = "sampled", "answered"
"""Not fates: tokens that an explorer sampled, and those whose answers the server took."""
SLOW = 1.5
"""Least ratio to the others' median of a straggler: below it, ratios of short runs are noise."""
_LEAST = 3
"""Least measurements of a straggler."""
_KEPT_STEPS = 65_536
"""Steps that a resume may discard: checkpoints that are further back were removed long ago."""
_SILENT = 90.0
"""Seconds without an entry after which no process is taken to live: each reports once a minute."""
_DRIVER = "trainer-0"
_SERVICES = frozenset({"reducer", STANDBY_ROLE, LOG_SERVER_ROLE, CHUNK_SERVER_ROLE})
"""Roles of processes that serve a run until its end and after it, without a last report."""
_NEVER_MEASURED = ("the launcher", "the processes of Ray")
_SERVERS = {LOG_SERVER_ROLE: "the log's server", CHUNK_SERVER_ROLE: "the chunk server"}
"""Servers that report if the run's launcher started them, in words."""
_MISSED = 2.0
"""Pauses between reports after which a standby reducer has ended: a busy host is late by one."""


class WorkerTime(Struct, frozen=True, kw_only=True):
    """Time of one process."""

    process: str
    """Role and rank."""
    host: str
    epoch: int
    seconds: dict[str, float]
    """Seconds by fate."""
    computes: bool
    """True if it has a GPU, or cores to compute with."""


class Waste(Struct, frozen=True, kw_only=True):
    """Work that was wasted, or time that was waited, and its cause."""

    kind: Literal["died", "old-checkpoint", "tokens", "waited"]
    subject: str
    """Process that died, fate of tokens, or object of the wait."""
    detail: str = ""
    seconds: float = 0.0
    """Worker-seconds that it cost."""
    share: float = 0.0
    """Part of all worker-seconds, from 0 to 1."""
    tokens: int = 0
    """Sampled tokens that it cost."""


class Straggler(Struct, frozen=True, kw_only=True):
    """Process that is slower at something than the others' median."""

    process: str
    host: str
    measure: str
    """Activity, with its unit."""
    seconds: float
    """Its mean."""
    others: float
    """Median of the others' means."""
    ratio: float
    excess: float
    """Seconds beyond the median in all."""


class Goodput(Struct, frozen=True, kw_only=True):
    """Goodput of a run. Seconds are worker-seconds: those of all processes add up."""

    run_id: str
    seconds: dict[str, float]
    """Seconds of all processes by fate."""
    worker_seconds: dict[str, float]
    """Those of ranks and explorers alone, by fate."""
    productive: float
    """Part of the ranks' and explorers' seconds that made gradient, from 0 to 1."""
    tokens: dict[str, int]
    """Sampled tokens by fate."""
    trained_tokens: float
    """Part of the sampled tokens of training that was trained on, from 0 to 1."""
    samples: int
    """Samples that the current lineage trained on."""
    elapsed: float
    """Seconds for which epochs of the run were open."""
    devices: float
    """GPUs, or cores without any, that ranks and explorers held on average."""
    device: Literal["GPU", "core"]
    tokens_per_device_second: float
    """Trained tokens a second and device."""
    samples_per_device_second: float
    """Trained samples a second and device."""
    waste: list[Waste]
    """Causes of waste, those of most seconds first."""
    stragglers: list[Straggler]
    """Slow processes, those of most seconds first."""
    workers: list[WorkerTime]
    """Processes, those of the first epoch first."""
    unmeasured: list[str]
    """Processes whose seconds are not known, in words; empty if none has reported any."""


class _Worker(Struct):
    """One start of a process."""

    name: str
    host: str
    epoch: int
    began: float
    read_at: float
    seen_at: float
    last: PhasesMeasured
    recomputed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of its phases in which steps were trained again."""
    died_at: float | None = None

    @property
    def computes(self) -> bool:
        return self.last.gpus > 0 or self.last.cores > 0

    @property
    def role(self) -> str:
        return self.name.rpartition("-")[0]

    def is_unheard(self, end: float) -> bool:
        """Return True if a standby reducer has missed its next report: it has no lease."""
        pause = find_pause(sum(self.last.seconds.values()))
        is_late = end - self.read_at > _MISSED * pause
        return self.role == STANDBY_ROLE and not self.last.is_last and is_late


class _EpochRecord(Struct):
    """Opening of the run, until the next one."""

    number: int
    opened_at: float
    last_at: float
    staleness: int | None = None
    """Bound of staleness in its configuration."""
    closed_at: float | None = None
    is_interrupted: bool = False
    resumed: int = 0
    redo_until: int = 0
    """Last step that an earlier epoch had trained, and that is trained again."""
    redo_ended_at: float | None = None
    discarded: int = 0
    """Tokens of earlier epochs' trained steps that its opening discards."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Tokens whose fate its trainer decided."""


class _StepSums(NamedTuple):
    """Samples and tokens that a step was trained on."""

    samples: int
    tokens: int


class _Measure(Struct):
    """Sums of a measurement of one process."""

    host: str
    seconds: float = 0.0
    count: float = 0.0


class GoodputReader:
    """Reader of a run's goodput; it takes the events in the order of the log."""

    def __init__(self, run_id: str = "") -> None:
        self.run_id = run_id
        self._sequences: dict[str, int] = {}
        self._epochs: list[_EpochRecord] = []
        self._workers: dict[str, _Worker] = {}
        """Workers by the incarnation of their publisher."""
        self._current: dict[str, str] = {}
        """Role and rank to the incarnation that started last."""
        self._steps: dict[int, _StepSums] = {}
        """Last steps of the current lineage, which a resume may discard."""
        self._settled_samples = 0
        """Samples of earlier steps, further back than any resume."""
        self._measures: dict[str, dict[str, _Measure]] = defaultdict(dict)
        self._applications = FirstApplications()

    def add(self, now: float, envelope: Envelope) -> None:
        """Take an entry of a time in Unix seconds; a repeated one changes nothing."""
        name, sequence = envelope.producer.incarnation, envelope.sequence
        if sequence <= self._sequences.pop(name, 0):
            self._sequences[name] = max(sequence, self._sequences.get(name, 0))
            return
        self._sequences[name] = sequence
        trim_oldest(self._sequences, KEPT_PRODUCERS)
        event = envelope.event
        if isinstance(event, RunOpened | RunResumed):
            self._open(envelope.epoch, now, event)
        if not self._epochs:
            if not envelope.epoch or envelope.producer.role == REPORTER_ROLE:
                return
            # A reader that begins amid the log, as that of the metrics may.
            epoch = _EpochRecord(number=envelope.epoch, opened_at=now, last_at=now)
            self._epochs.append(epoch)
        self._epochs[-1].last_at = now
        self._record_life(envelope.producer, now)
        match event:
            case PhasesMeasured():
                self._measure(envelope, event, now)
            case LeaseExpired(holder=holder, lease=lease):
                dead = self._find(format_producer(holder))
                if dead is not None and not dead.last.is_last:
                    dead.died_at = max(dead.read_at, now - lease)
            case StepTrained() if envelope.epoch == self._epochs[-1].number:
                self._train(event, now)
            case RunClosed(reason=reason) if envelope.epoch == self._epochs[-1].number:
                self._epochs[-1].closed_at = now
                self._epochs[-1].is_interrupted = reason == "interrupted"
            case _:
                self._compare(envelope, event)

    def goodput(self, now: float | None = None) -> Goodput:
        """Return the goodput so far.

        Args:
            now: Unix time in seconds by the server's clock, up to which an open run's processes
                are taken to be in their last phase; by default that of the last entry.
        """
        ends = {epoch.number: self._find_end(epoch, now) for epoch in self._epochs}
        workers = [self._close(worker, ends[worker.epoch]) for worker in self._workers.values()]
        self._split_waits(workers)
        everything = _add_up(worker.seconds for worker in workers)
        computing = _add_up(worker.seconds for worker in workers if worker.computes)
        tokens = self._count_tokens()
        units = self._count_devices(workers)
        trained = tokens["trained"]
        of_training = sum(tokens.values()) - tokens["evaluated"]
        elapsed = sum(
            end - epoch.opened_at for epoch, end in zip(self._epochs, ends.values(), strict=True)
        )
        samples = self._settled_samples + sum(step.samples for step in self._steps.values())
        return Goodput(
            run_id=self.run_id,
            seconds=_sort(everything, FATES),
            worker_seconds=_sort(computing, FATES),
            productive=_ratio(
                sum(computing[phase] for phase in PRODUCTIVE), sum(computing.values())
            ),
            tokens=_sort(tokens, TOKEN_FATES),
            trained_tokens=_ratio(trained, of_training),
            samples=samples,
            elapsed=elapsed,
            devices=_ratio(units[1], elapsed),
            device=units[0],
            tokens_per_device_second=_ratio(trained, units[1]),
            samples_per_device_second=_ratio(samples, units[1]),
            waste=self._find_waste(workers, everything, tokens),
            stragglers=self._find_stragglers(),
            workers=workers,
            unmeasured=self._list_unmeasured(ends),
        )

    # --- entries -----------------------------------------------------------------------------

    def _open(self, number: int, now: float, event: RunOpened | RunResumed) -> None:
        if self._epochs and number <= self._epochs[-1].number:
            return
        epoch = _EpochRecord(
            number=number, opened_at=now, last_at=now, staleness=_read_staleness(event.config)
        )
        if isinstance(event, RunOpened):
            # Nothing continues: what an earlier lineage trained counts for no model.
            epoch.resumed = -1
            discarded = dict(self._steps)
            self._settled_samples = 0
        else:
            epoch.resumed = event.step
            discarded = {step: sums for step, sums in self._steps.items() if step > event.step}
            epoch.redo_until = max(discarded, default=0)
        epoch.discarded = sum(sums.tokens for sums in discarded.values())
        for step in discarded:
            del self._steps[step]
        self._epochs.append(epoch)
        self._current.clear()

    def _record_life(self, producer: Producer, now: float) -> None:
        """Record a sign of life: a process has several publishers, an explorer has one."""
        process = format_producer(producer)
        worker = self._find(process)
        # An explorer that starts again is no life of the one before.
        if worker is not None and (
            producer.role != REPORTER_ROLE or self._current[process] == producer.incarnation
        ):
            worker.seen_at = now

    def _find(self, name: str) -> _Worker | None:
        """Return the worker that started last under a name, in the present epoch."""
        incarnation = self._current.get(name)
        return None if incarnation is None else self._workers[incarnation]

    def _measure(self, envelope: Envelope, event: PhasesMeasured, now: float) -> None:
        incarnation, name = envelope.producer.incarnation, format_producer(envelope.producer)
        worker = self._workers.get(incarnation)
        if envelope.producer.role == STANDBY_ROLE:
            event = self._clip(event, now)
        if worker is None:
            replaced = self._find(name)
            if replaced is not None and replaced.died_at is None and not replaced.last.is_last:
                replaced.died_at = replaced.seen_at
            began = now - sum(event.seconds.values())
            worker = self._workers[incarnation] = _Worker(
                name=name,
                host=envelope.producer.node,
                epoch=self._epochs[-1].number,
                began=began,
                read_at=began,
                seen_at=now,
                last=PhasesMeasured(seconds={}, phase=event.phase),
            )
            self._current[name] = incarnation
        redone = self._redone(worker, now)
        for phase in PRODUCTIVE:
            grown = event.seconds.get(phase, 0.0) - worker.last.seconds.get(phase, 0.0)
            worker.recomputed[phase] += redone * max(grown, 0.0)
        # It lives: its lease had expired while it was cut off.
        worker.died_at = None
        worker.read_at = worker.seen_at = now
        worker.last = event

    def _clip(self, event: PhasesMeasured, now: float) -> PhasesMeasured:
        """Return a report with the seconds that are of the epoch: standbys outlast epochs."""
        epoch = self._epochs[-1]
        most = (now if epoch.closed_at is None else epoch.closed_at) - epoch.opened_at
        seconds = {phase: min(seconds, most) for phase, seconds in event.seconds.items()}
        return structs.replace(event, seconds=seconds)

    def _redone(self, worker: _Worker, now: float) -> float:
        """Return the part of the time since a worker's report in which steps were trained again."""
        epoch = self._epochs[-1]
        if worker.epoch != epoch.number or not epoch.redo_until:
            return 0.0
        end = now if epoch.redo_ended_at is None else min(epoch.redo_ended_at, now)
        return min(1.0, _ratio(max(end - worker.read_at, 0.0), now - worker.read_at))

    def _train(self, event: StepTrained, now: float) -> None:
        epoch = self._epochs[-1]
        for fate, count in event.tokens.items():
            epoch.tokens[fate] += count
        self._steps[event.step] = _StepSums(
            samples=sum(event.staleness.values()), tokens=event.tokens.get("trained", 0)
        )
        if len(self._steps) > _KEPT_STEPS:
            self._settled_samples += self._steps.pop(min(self._steps)).samples
        if event.step >= epoch.redo_until and epoch.redo_ended_at is None:
            epoch.redo_ended_at = now

    def _compare(self, envelope: Envelope, event: Event) -> None:
        """Add to the measurements of a process, which are compared with the others'."""
        match event:
            case WeightsApplied(phases=phases):
                # An earlier version, for an evaluation, is another transfer.
                if self._applications.add(envelope, event):
                    self._add_measure("fetching a version", envelope, phases.fetch)
                    self._add_measure("installing a version", envelope, phases.pause)
            case VersionPartPublished(seconds=seconds):
                self._add_measure("publishing a version", envelope, seconds)
            case SaveFinished(seconds=seconds, slot=slot):
                self._add_measure(f"saving {slot.name}", envelope, seconds)
            case _:
                pass

    def _add_measure(self, name: str, envelope: Envelope, seconds: float) -> None:
        process = format_producer(envelope.producer)
        by_process = self._measures[name]
        measure = by_process.setdefault(process, _Measure(host=envelope.producer.node))
        measure.seconds += seconds
        measure.count += 1

    # --- seconds -----------------------------------------------------------------------------

    def _find_end(self, epoch: _EpochRecord, now: float | None) -> float:
        """Return the time at which an epoch ended; for an open one, the present."""
        if epoch.closed_at is not None:
            return epoch.closed_at
        if epoch is self._epochs[-1] and now is not None:
            # A run that was killed, and is not closed, has no worker any more.
            return min(max(now, epoch.last_at), epoch.last_at + _SILENT)
        # The opening of the next epoch came later than the end of this one, which was killed.
        return epoch.last_at

    def _close(self, worker: _Worker, end: float) -> WorkerTime:
        """Return a worker's seconds by fate, up to the end of its epoch."""
        seconds = _add_up([worker.last.seconds])
        for phase, redone in worker.recomputed.items():
            seconds[phase] -= redone
            seconds[RECOMPUTING] += redone
        died_at = self._find_death(worker)
        if died_at is not None:
            seconds[LOST] += max(died_at - worker.read_at, 0.0)
            seconds[DOWN] += max(self._find_successor(worker, end) - died_at, 0.0)
        elif not worker.last.is_last and not worker.is_unheard(end):
            # Still alive, as far as the log tells: it is in the phase of its last report.
            seconds[worker.last.phase] += max(end - worker.read_at, 0.0)
        return WorkerTime(
            process=worker.name,
            host=worker.host,
            epoch=worker.epoch,
            seconds=_sort(seconds, FATES),
            computes=worker.computes,
        )

    def _find_death(self, worker: _Worker) -> float | None:
        """Return the time at which a worker died, by its last sign of life; None if it did not."""
        # Standbys share one name, and none takes the place of another.
        if worker.last.is_last or worker.role == STANDBY_ROLE:
            return None
        if worker.died_at is not None:
            return worker.died_at
        # It reports nothing of a closed run: another reducer's first report tells a death.
        if worker.role in _SERVICES:
            return None
        epoch = next(epoch for epoch in self._epochs if epoch.number == worker.epoch)
        is_over = epoch is not self._epochs[-1] or epoch.closed_at is not None
        has_died = is_over and not epoch.is_interrupted
        return max(worker.seen_at, worker.read_at) if has_died else None

    def _list_unmeasured(self, ends: Mapping[int, float]) -> list[str]:
        """Return the processes whose seconds no report has, in words."""
        if not self._workers:
            return []
        roles = {worker.role for worker in self._workers.values()}
        servers = (words for role, words in _SERVERS.items() if role not in roles)
        unheard = (
            f"{worker.name} on {worker.host} after its last report"
            for worker in self._workers.values()
            if worker.is_unheard(ends[worker.epoch])
        )
        return [*_NEVER_MEASURED, *servers, *unheard]

    def _find_successor(self, worker: _Worker, end: float) -> float:
        """Return the time at which a dead worker's next start began; else the epoch's end."""
        begins = [
            later.began
            for later in self._workers.values()
            if later.name == worker.name
            and later.epoch == worker.epoch
            and later.began > worker.began
        ]
        return min([*begins, end])

    def _split_waits(self, workers: Sequence[WorkerTime]) -> None:
        """Say of waits for the trainer what it did meanwhile, and which waits are for a tail."""
        drivers = {worker.epoch: worker.seconds for worker in workers if worker.process == _DRIVER}
        for worker in workers:
            driver = drivers.get(worker.epoch)
            if driver is None or worker.process == _DRIVER:
                continue
            if "waiting-trainer" in worker.seconds:
                _split_by_driver(worker.seconds, driver)
            elif worker.computes:
                _split_tail(worker.seconds, driver)

    def _count_devices(self, workers: Sequence[WorkerTime]) -> tuple[Literal["GPU", "core"], float]:
        """Return the device that workers hold, and for how many seconds times their number."""
        gpus = cores = 0.0
        for worker, time in zip(self._workers.values(), workers, strict=True):
            total = sum(time.seconds.values())
            gpus += worker.last.gpus * total
            cores += worker.last.cores * total
        return ("GPU", gpus) if gpus else ("core", cores)

    # --- tokens ------------------------------------------------------------------------------

    def _count_tokens(self) -> Counter[str]:
        """Return the tokens by fate."""
        fates, lost = Counter[str](), 0
        for epoch in self._epochs:
            of_epoch = [worker for worker in self._workers.values() if worker.epoch == epoch.number]
            decided = Counter(epoch.tokens)
            kept_tokens = decided.pop(_KEPT, 0)
            fates.update(decided)
            answered, in_flight = 0, 0
            for worker in of_epoch:
                own = Counter(worker.last.tokens)
                answered += own.pop(_ANSWERED, 0)
                sampled = own.pop(_SAMPLED, 0)
                fates.update(own)
                under_way = sampled - worker.last.tokens.get(_ANSWERED, 0) - own.total()
                under_way = max(under_way + own["evaluated"], 0)
                if self._find_death(worker) is not None:
                    lost += under_way
                else:
                    in_flight += under_way
            # An explorer that died may have told of fewer answers than the trainer has read.
            unread = max(answered + kept_tokens - decided.total(), 0)
            if epoch is self._epochs[-1]:
                fates["open"] += unread + in_flight
            else:
                lost += unread + in_flight
            lost += epoch.discarded - kept_tokens
            fates["trained"] -= epoch.discarded
        fates["lost"] += max(lost, 0)
        return fates

    # --- waste ------------------------------------------------------------------------------

    def _find_waste(
        self, workers: Sequence[WorkerTime], seconds: Mapping[str, float], tokens: Mapping[str, int]
    ) -> list[Waste]:
        total = sum(seconds.values())
        waste = [
            Waste(
                kind="died",
                subject=time.process,
                detail=time.host,
                seconds=cost,
                share=_ratio(cost, total),
                tokens=self._count_in_flight(worker),
            )
            for worker, time in zip(self._workers.values(), workers, strict=True)
            if self._find_death(worker) is not None
            and (cost := time.seconds.get(LOST, 0.0) + time.seconds.get(DOWN, 0.0)) > 0
        ]
        for epoch in self._epochs:
            cost = sum(
                time.seconds.get(RECOMPUTING, 0.0) for time in workers if time.epoch == epoch.number
            )
            if epoch.redo_until or epoch.discarded:
                waste.append(
                    Waste(
                        kind="old-checkpoint",
                        subject=f"step {epoch.resumed}" if epoch.resumed >= 0 else "none",
                        detail=f"steps to {epoch.redo_until} were trained again",
                        seconds=cost,
                        share=_ratio(cost, total),
                        tokens=epoch.discarded,
                    )
                )
        for fate, count in tokens.items():
            if count and fate not in ("trained", "evaluated", "open", "lost"):
                bound = self._epochs[-1].staleness if fate == "stale" else None
                detail = "" if bound is None else f"sync.max_staleness {bound}"
                waste.append(Waste(kind="tokens", subject=fate, detail=detail, tokens=count))
        waste += [
            Waste(kind="waited", subject=fate, seconds=cost, share=_ratio(cost, total))
            for fate, cost in seconds.items()
            if fate.startswith("waiting-") and cost > 0
        ]
        return sorted(waste, key=lambda cause: (-cause.seconds, -cause.tokens, cause.subject))

    def _count_in_flight(self, worker: _Worker) -> int:
        tokens = worker.last.tokens
        others = sum(count for fate, count in tokens.items() if fate not in (_SAMPLED, "evaluated"))
        return max(tokens.get(_SAMPLED, 0) - others, 0)

    def _find_stragglers(self) -> list[Straggler]:
        generating: dict[str, _Measure] = {}
        judging: dict[str, _Measure] = {}
        for worker in self._workers.values():
            rows = (
                (generating, "generating", worker.last.tokens.get(_SAMPLED, 0) / 1000),
                (judging, "judging", worker.last.samples),
            )
            for by_process, phase, count in rows:
                if count:
                    measure = by_process.setdefault(worker.name, _Measure(host=worker.host))
                    measure.seconds += worker.last.seconds.get(phase, 0.0)
                    measure.count += count
        measures = {
            **self._measures,
            "generating 1,000 tokens": generating,
            "judging an answer": judging,
        }
        return sorted(
            (
                straggler
                for name, by_process in measures.items()
                for straggler in _find_slow(name, by_process)
            ),
            key=lambda straggler: -straggler.excess,
        )


def _find_slow(name: str, by_process: Mapping[str, _Measure]) -> Iterable[Straggler]:
    """Yield the processes that are slow at something."""
    means = {
        process: measure.seconds / measure.count
        for process, measure in by_process.items()
        # Tokens are counted by thousands: a part of them is many.
        if measure.count >= _LEAST or name.startswith("generating")
    }
    for process, mean in means.items():
        others = [other for key, other in means.items() if key != process]
        middle = median(others) if others else 0.0
        if middle > 0 and mean >= SLOW * middle:
            measure = by_process[process]
            yield Straggler(
                process=process,
                host=measure.host,
                measure=name,
                seconds=mean,
                others=middle,
                ratio=mean / middle,
                excess=(mean - middle) * measure.count,
            )


def _split_by_driver(seconds: dict[str, float], driver: Mapping[str, float]) -> None:
    """Divide a rank's waits for the trainer by what the trainer did while no rank worked.

    The log has no times of single waits: sums of the epoch give the parts.
    """
    wait = seconds.pop("waiting-trainer")
    parts = {
        fate: cost for fate, cost in driver.items() if fate.startswith("waiting-") or fate == "idle"
    }
    # While both start, the rank does not wait yet.
    parts["starting"] = max(driver.get("starting", 0.0) - seconds.get("starting", 0.0), 0.0)
    # Calls take longer than the work of the rank: arguments travel, and the slowest rank ends them.
    calls = sum(driver.get(phase, 0.0) for phase in ("training", "publishing", "saving"))
    work = sum(seconds.get(phase, 0.0) for phase in ("training", "publishing", "saving"))
    parts["waiting-trainer"] = max(calls - work, 0.0)
    total = sum(parts.values())
    if not total:
        parts["waiting-trainer"] = total = 1.0
    for fate, cost in parts.items():
        seconds[fate] = seconds.get(fate, 0.0) + wait * cost / total


def _split_tail(seconds: dict[str, float], driver: Mapping[str, float]) -> None:
    """Move an explorer's waits beyond the trainer's work to the tail of the others' answers.

    While the trainer waits for rollouts, an explorer without a request waits for other explorers.
    It waits for the trainer for no longer than that is at work: the rest is the least tail.
    """
    waits = [fate for fate in ("waiting-requests", "waiting-weights") if seconds.get(fate)]
    total = sum(seconds[fate] for fate in waits)
    own_start, start = seconds.get("starting", 0.0), driver.get("starting", 0.0)
    age = sum(driver.values()) - start
    present = min(_ratio(sum(seconds.values()) - own_start, age), 1.0)
    busy = (age - driver.get("waiting-rollouts", 0.0)) * present + max(start - own_start, 0.0)
    tail = max(total - busy, 0.0)
    if tail:
        for fate in waits:
            seconds[fate] *= 1 - tail / total
        seconds[TAIL] = tail


def _read_staleness(config: str | None) -> int | None:
    """Return the bound of staleness of a configuration; None if it has none or is no JSON."""
    try:
        settings: Any = json.loads(config or "{}")
        bound = settings["sync"]["max_staleness"]
    # Another trainer's configuration may have any form.
    except (ValueError, KeyError, TypeError):
        return None
    return bound if isinstance(bound, int) else None


def _add_up(rows: Iterable[Mapping[str, float]]) -> defaultdict[str, float]:
    """Return the sums of rows by name."""
    sums = defaultdict[str, float](float)
    for row in rows:
        for name, number in row.items():
            sums[name] += number
    return sums


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _sort(counts: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Return what is not zero, in an order; unknown names come last."""
    places = {name: place for place, name in enumerate(order)}
    names = sorted(counts, key=lambda name: (places.get(name, len(places)), name))
    return {name: counts[name] for name in names if counts[name]}
