"""Simulated run with many workers and planted faults: demo data, and logs of any length.

The events are those of a real run, in the contract's types. Only their times and figures are drawn,
from a seed. The fold, the index and the pages are the real ones.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property

from msgspec import Struct

from trinity_schemas import (
    AppliedPhases,
    ChosenTransport,
    ConsumerDetached,
    Envelope,
    Event,
    ExpiredAttempt,
    ExplorerStatusChanged,
    LeaseExpired,
    LedgerRestored,
    PhasesMeasured,
    Producer,
    Registration,
    ReissuedRollout,
    RolloutsDispatched,
    RunOpened,
    RunResumed,
    SaveFailed,
    SaveFinished,
    SaveProgressed,
    SaveStarted,
    Slot,
    StepCommitted,
    StepRef,
    StepTrained,
    ThreadCountRegistered,
    TrainedLedger,
    TrainerStatusChanged,
    VersionOpened,
    VersionPartPublished,
    VersionRefused,
    WaitEnded,
    WaitStarted,
    WeightsApplied,
    WeightsProof,
    encode,
    version_digest,
)

from ..core.alarms import TRUNCATED_ANSWERS, AlarmJudge
from ..log import Entry

# Bytes of a rank: sixteen of them are some 7.7 billion parameters in bfloat16.
_SHARD = 965_000_000
_PROMPTS = 64
SAMPLES = 8
"""Samples of a prompt."""
MAX_STALENESS = 2
_A_NODE = 8
_STARTING = 4.0
"""Seconds in which processes start, at least."""
_REPORT_INTERVAL = 3
"""Steps between reports of phases: 54 s of the demo, as processes report once a minute."""
_WAITS = {
    "trainer": "waiting-rollouts",
    "actor": "waiting-trainer",
    "explorer": "waiting-requests",
}
"""Phase of a process, by its role, while it does nothing else."""
_THRESHOLDS = {"stalled_step": 3.0, "truncated_answers": 0.3}
_TRUNCATED = (range(50, 57), range(114, 121))
"""Steps of the demo with many answers cut off: an alarm that is over, and one that is not."""
_FINGERPRINT = f"sha256:{hashlib.sha256(b'tasks').hexdigest()}"
BEGIN = 1_767_258_000_000
"""Milliseconds at which the demo's run begins: 2026-01-01 09:00 UTC."""


class Plan(Struct, frozen=True, kw_only=True):
    """Size of a simulated run, and its seed."""

    run_id: str = "demo-64-workers"
    ranks: int = 16
    """Trainer ranks."""
    explorers: int = 47
    steps: int = 120
    save_interval: int = 10
    seconds: float = 18.0
    """Mean duration of a step."""
    faults: bool = True
    """True for the faults of the demo, which need its size."""
    begin: int = BEGIN
    seed: int = 7


def simulated_run(plan: Plan) -> Iterator[Entry]:
    """Yield the events of a run as a server would have them, in the order of their ids."""
    return _Simulation(plan).entries()


class _Happening(Struct, frozen=True, order=True):
    """Event that is about to be appended."""

    at: int
    order: int
    producer: Producer | None
    event: Event | bytes
    epoch: int
    repeat: bool


class _Usage:
    """Time, tokens and samples of a process since its start."""

    def __init__(self, start: float) -> None:
        self.until = start
        """Milliseconds until which its seconds are counted."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tokens = 0
        self.samples = 0

    def add_seconds(self, until: float, phases: Mapping[str, float], wait: str) -> None:
        """Count the time until a moment: phases, as far as they fit into it, then a wait."""
        remaining = (until - self.until) / 1000
        for phase, seconds in phases.items():
            spent = min(seconds, remaining)
            self.seconds[phase] += spent
            remaining -= spent
        self.seconds[wait] += remaining
        self.until = until


class _Simulation:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        # Seeded: pictures of the documentation and tests need the same run each time.
        self.random = random.Random(plan.seed)  # noqa: S311
        self.epoch = 1
        self._resumed_step = 0
        """Step of the epoch's first version."""
        self.clock = float(plan.begin)
        self._coming: list[tuple[int, int, _Happening]] = []
        self._order = 0
        self._sequences: dict[str, int] = {}
        self._starts: dict[tuple[str, int], int] = {}
        self._last = (0, 0)
        self.served: dict[int, int] = {}
        """Explorer to the step of its version."""
        # Separate: entries that pictures and tests name keep their times and figures.
        self._phase_random = random.Random(plan.seed + 1)  # noqa: S311
        self._alarms = AlarmJudge(_THRESHOLDS)
        self._trained_at: float | None = None
        """Seconds at which the trainer ended a step of this epoch; None before the first."""
        self._usages: dict[tuple[str, int], _Usage] = {}

    # --- what the log does -----------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        for begin in self._steps():
            yield from self._until(int(begin))
        yield from self._until(int(self.clock))

    def _until(self, at: int) -> Iterator[Entry]:
        # Only up to the begin of the next step, whose events may be earlier than those of this one.
        while self._coming and self._coming[0][0] < at:
            yield self._entry(heapq.heappop(self._coming)[2])

    def _entry(self, happening: _Happening) -> Entry:
        # Ids never go back, as a server's do not.
        at = max(happening.at, self._last[0])
        self._last = (at, self._last[1] + 1 if at == self._last[0] else 0)
        entry_id = f"{self._last[0]}-{self._last[1]}"
        if happening.producer is None or isinstance(happening.event, bytes):
            return Entry(entry_id, happening.event if isinstance(happening.event, bytes) else b"")
        incarnation = happening.producer.incarnation
        # A repeated event has the sequence of the one before: the fold must not count it.
        sequence = self._sequences.get(incarnation, 0) + (0 if happening.repeat else 1)
        self._sequences[incarnation] = sequence
        envelope = Envelope(
            run_id=self.plan.run_id,
            epoch=happening.epoch,
            producer=happening.producer,
            sequence=sequence,
            occurred_at=at / 1000,
            event=happening.event,
        )
        return Entry(entry_id, encode(envelope))

    def plan_event(
        self, seconds: float, who: tuple[str, int], event: Event | bytes, *, repeat: bool = False
    ) -> None:
        """Plan an event, in seconds from the begin of the step."""
        at = int(self.clock + seconds * 1000)
        self._order += 1
        producer = None if isinstance(event, bytes) else self._producer(*who)
        happening = _Happening(at, self._order, producer, event, self.epoch, repeat)
        # With a number of its own: events of one moment stay in the order of their plan.
        heapq.heappush(self._coming, (at, self._order, happening))

    def _producer(self, role: str, rank: int) -> Producer:
        start = self._starts.get((role, rank), 0)
        name = f"{self.plan.run_id}/{role}/{rank}/{start}"
        # Sixteen ranks are on the first two nodes; all other processes begin at the third.
        node = rank // _A_NODE + (0 if role in ("trainer", "actor") else 2)
        return Producer(
            role=role,
            rank=rank,
            node=f"node-{node:02d}",
            incarnation=hashlib.sha256(name.encode()).hexdigest()[:16],
        )

    def restart(self, role: str, rank: int, seconds: float = 0.0) -> None:
        """Give a process another start, in seconds from the begin of the step."""
        self._starts[role, rank] = self._starts.get((role, rank), 0) + 1
        self._usages[role, rank] = _Usage(self.clock + seconds * 1000)

    # --- what the run does -----------------------------------------------------------------

    def _steps(self) -> Iterator[float]:
        """Plan step after step; yield the time before which nothing else will be planned."""
        plan = self.plan
        self.plan_event(
            0, ("trainer", 0), RunOpened(transport=_TRANSPORT, save_strategy="unrestricted")
        )
        for rank in range(plan.explorers):
            joined = ExplorerStatusChanged(status="running")
            self.plan_event(self.random.uniform(0.2, 3), ("explorer", rank), joined)
        self.clock += 4000
        step, crash = 0, 101 if plan.faults else -1
        while step < plan.steps:
            step += 1
            if step == crash:
                crash = -1
                step = self._crash(step)
            length = self._step(step)
            yield self.clock
            self.clock += length * 1000
        if plan.faults:
            self._ends_waiting(step + 1)
            yield self.clock

    def _step(self, step: int) -> float:
        """Plan one step; return its seconds."""
        plan, draw = self.plan, self.random
        length = plan.seconds * draw.uniform(0.85, 1.2)
        trainer = ("trainer", 0)
        first = (step - 1) * _PROMPTS
        dispatched = RolloutsDispatched(
            ordinals=((first, first + _PROMPTS - 1),),
            oldest=self._get_oldest(step),
            fingerprint=_FINGERPRINT,
        )
        self.plan_event(0.05, trainer, dispatched)
        generated = length * draw.uniform(0.5, 0.6)
        if plan.faults:
            length, generated = self._straggler(step, length, generated)
        publish = generated + length * 0.2
        self.plan_event(generated, trainer, TrainerStatusChanged(status="running", step=step))
        staleness, metrics = self._staleness(step), self._metrics(step, length)
        tokens = round(_PROMPTS * SAMPLES * metrics["response_length"])
        fates = {"trained": tokens}
        lost: dict[str, tuple[tuple[int, int], ...]] = {}
        if step % 7 == 0:
            # Now and then two prompts are filtered, so that the ledger shows a fate besides
            # training.
            lost = {"filtered": ((first + 3, first + 4),)}
            fates = {"trained": tokens - tokens // 32, "filtered": tokens // 32}
            staleness[0] -= 2 * SAMPLES
        trained = (
            ((first, first + 2), (first + 5, first + _PROMPTS - 1))
            if lost
            else ((first, first + _PROMPTS - 1),)
        )
        self.plan_event(
            publish - 0.05,
            trainer,
            StepTrained(
                step=step,
                trained=trained,
                dropped=lost,
                staleness=staleness,
                tokens=fates,
                metrics=metrics,
            ),
        )
        self._plan_alarms(step, publish, metrics)
        self._version(step, publish)
        if step % plan.save_interval == 0:
            self._checkpoint(step, publish + 0.4)
        if plan.faults:
            self._oddities(step, publish)
        self._plan_reports(step, length, publish - generated, tokens)
        return length

    def _plan_alarms(self, step: int, publish: float, metrics: Mapping[str, float]) -> None:
        """Plan the alarms that the trainer raises and clears after a step."""
        at = self.clock / 1000 + publish
        seconds = None if self._trained_at is None else at - self._trained_at
        self._trained_at = at
        for event in self._alarms.judge_step(step, metrics, seconds):
            self.plan_event(publish, ("trainer", 0), event)

    def _plan_reports(self, step: int, length: float, training: float, tokens: int) -> None:
        """Count the time and the tokens of a step, and plan the reports of the processes."""
        plan, end = self.plan, self.clock + length * 1000
        work = {"training": training, "publishing": 0.9}
        if step % plan.save_interval == 0:
            work["saving"] = 1.5  # a rank trains while the rest of a save is written
        counts = {"trainer": 1, "actor": plan.ranks, "explorer": plan.explorers}
        processes = [(role, rank) for role, count in counts.items() for rank in range(count)]
        for role, rank in processes:
            usage = self._usages.setdefault((role, rank), _Usage(plan.begin))
            if usage.until >= end:
                continue  # it starts after this step
            phases = work
            if role == "explorer":
                phases = self._draw_phases(length)
                usage.tokens += _get_share(tokens, rank, plan.explorers)
                usage.samples += _get_share(_PROMPTS * SAMPLES, rank, plan.explorers)
            if not usage.seconds:
                start = max((end - usage.until) / 1000 - length, _STARTING)
                phases = {"starting": start, **phases}
            usage.add_seconds(end, phases, _WAITS[role])
            if step % _REPORT_INTERVAL == 0 or step == plan.steps:
                names = ("sampled", "answered") if role == "explorer" else ()
                report = PhasesMeasured(
                    seconds=dict(usage.seconds),
                    phase=_WAITS[role],
                    tokens=dict.fromkeys(names, usage.tokens),
                    samples=usage.samples,
                    gpus=0.0 if role == "trainer" else 1.0,
                )
                # Within the step, so that the report of the last step is in the log.
                self.plan_event(length - 0.001, (role, rank), report)

    def _draw_phases(self, length: float) -> dict[str, float]:
        """Return the phases of an explorer in a step; the rest is the wait for its requests."""
        draw = self._phase_random.uniform
        # A step that is held up is no longer for the explorers that wait for it.
        length = min(length, 1.2 * self.plan.seconds)
        return {
            "generating": length * draw(0.6, 0.72),
            "judging": length * draw(0.05, 0.09),
            "installing": draw(0.1, 0.25),
        }

    def _get_oldest(self, step: int) -> StepRef:
        """Return the oldest version that may serve the requests of a step."""
        return StepRef(self.epoch, max(self._resumed_step, step - 1 - MAX_STALENESS))

    def _staleness(self, step: int) -> dict[int, int]:
        # 512 samples: eight of each prompt.
        fresh = self.random.randint(420, 512)
        late = self.random.randint(0, 512 - fresh)
        numbers = (fresh, 512 - fresh - late, late)
        # An epoch has no version before its first one.
        most = step - 1 - self._get_oldest(step).step
        staleness: Counter[int] = Counter()
        for age, number in enumerate(numbers):
            staleness[min(age, most)] += number
        return dict(+staleness)

    def _metrics(self, step: int, length: float) -> dict[str, float]:
        noise = self.random.gauss
        learnt = 1 - math.exp(-step / 55)
        return {
            "reward/mean": 0.12 + 0.68 * learnt + noise(0, 0.025),
            "reward/std": 0.32 - 0.14 * learnt + noise(0, 0.01),
            "loss": 0.42 * math.exp(-step / 60) + 0.05 + noise(0, 0.012),
            "kl": 0.002 + 0.0009 * step**0.6 + abs(noise(0, 0.0006)),
            "entropy": 1.9 * math.exp(-step / 140) + noise(0, 0.03),
            # A peak at one step, so that the charts show an outlier.
            "grad_norm": 0.9 + abs(noise(0, 0.25)) + (2.2 if step == 63 else 0),
            "response_length": 240 + 210 * learnt + noise(0, 12),
            "tokens_per_second": 61_000 * self.plan.seconds / length + noise(0, 900),
            TRUNCATED_ANSWERS: self._phase_random.uniform(0.01, 0.05)
            + (0.34 if self.plan.faults and any(step in steps for steps in _TRUNCATED) else 0),
        }

    def _version(self, step: int, publish: float) -> None:
        plan, draw = self.plan, self.random
        opened = VersionOpened(step=step, ranks=tuple(range(plan.ranks)), transport="redis")
        self.plan_event(publish, ("actor", 0), opened)
        last = publish
        for rank in range(plan.ranks):
            began = publish + draw.uniform(0.01, 0.06)
            seconds = draw.uniform(0.55, 0.95) + (1.4 if draw.random() < 0.01 else 0)
            save_id = f"w{self.epoch}-{step}-{rank}"
            slot = Slot(step=step, kind="weights", role="actor", rank=rank, name="weights")
            self.plan_event(
                began, ("actor", rank), SaveStarted(save_id=save_id, slot=slot, lease=15.0)
            )
            part = VersionPartPublished(
                step=step,
                rank=rank,
                manifest_digest=_digest(self.epoch, step, rank),
                bytes=_SHARD,
                tensors=338,
                # Of 4 MiB each.
                chunks=231,
                seconds=seconds,
                save_id=save_id,
            )
            self.plan_event(began + seconds, ("actor", rank), part)
            last = max(last, began + seconds)
        self.plan_event(last + 0.01, ("trainer", 0), StepCommitted(step=step, kind="weights"))
        for rank in range(plan.explorers):
            self._apply(step, rank, last + 0.02)

    def _apply(self, step: int, rank: int, ready: float) -> None:
        draw, plan = self.random, self.plan
        if plan.faults and self._is_cut_off(step, rank):
            return
        fetch, pause = draw.uniform(0.7, 1.6), draw.uniform(0.08, 0.22)
        ready += draw.expovariate(6)
        explorer = ("explorer", rank)
        if plan.faults and rank in (36, 37) and step in (58, 59, 61, 110, 113):
            refused = VersionRefused(
                version=StepRef(self.epoch, step),
                reason="chunk 114 of rank 3 has another digest than its manifest",
                rank=3,
                chunk=114 + step,
            )
            self.plan_event(ready + fetch, explorer, refused)
            return
        digest = version_digest([(rank, _digest(self.epoch, step, rank)) for rank in self._ranks])
        verified = (self.clock / 1000) + ready + fetch
        applied = WeightsApplied(
            version=StepRef(self.epoch, step),
            digest=digest,
            bytes=_SHARD * plan.ranks,
            verified_at=verified,
            phases=AppliedPhases(fetch=fetch, pause=pause),
            proof=WeightsProof(
                status="proven", checks=("names", "served"), tensors=338, seconds=pause / 2
            ),
        )
        self.plan_event(ready + fetch + pause, explorer, applied)
        self.served[rank] = step

    @cached_property
    def _ranks(self) -> range:
        return range(self.plan.ranks)

    def _checkpoint(self, step: int, begin: float) -> None:
        plan, draw = self.plan, self.random
        expected = Registration(
            registration_id=f"trainer-0-{self.epoch}-{step}",
            kind="checkpoint",
            expected=plan.ranks,
        )
        registered = ThreadCountRegistered(step=step, registration=expected)
        self.plan_event(begin, ("trainer", 0), registered)
        for rank in range(plan.ranks):
            started = begin + draw.uniform(0.02, 0.2)
            self._save(step, rank, started, draw.uniform(5, 9))
        commit = StepCommitted(step=step, kind="checkpoint", registrations=(expected,))
        self.plan_event(begin + 0.3, ("trainer", 0), commit)

    def _save(self, step: int, rank: int, started: float, seconds: float, again: int = 0) -> None:
        """Plan a save of one rank; two of the demo's saves go wrong."""
        slot = Slot(step=step, kind="checkpoint", role="actor", rank=rank, name="model")
        save_id = f"c{self.epoch}-{step}-{rank}-{again}"
        path = f"shards/step_{step}/model_{rank}.pt"
        who = ("actor", rank)
        self.plan_event(
            started, who, SaveStarted(save_id=save_id, slot=slot, path=path, lease=15.0)
        )
        # The first of two faults: the save is tried again by another start of the rank.
        if self.plan.faults and not again and (step, rank) == (40, 5):
            self._killed(slot, save_id, started)
            return
        if self.plan.faults and not again and (self.epoch, step, rank) == (1, 90, 11):
            message = "[Errno 28] No space left on device: 'model_11.pt'"
            failed = SaveFailed(save_id=save_id, slot=slot, error_type="OSError", message=message)
            self.plan_event(started + 3.1, who, failed)
            return
        half = SaveProgressed(save_id=save_id, slot=slot, bytes=_SHARD // 2, total=_SHARD)
        self.plan_event(started + seconds / 2, who, half)
        finished = SaveFinished(
            save_id=save_id,
            slot=slot,
            path=path,
            bytes=_SHARD,
            seconds=seconds,
            digest=_digest(self.epoch, step, 1000 + rank),
        )
        self.plan_event(started + seconds, who, finished)

    # --- what goes wrong -------------------------------------------------------------------

    def _killed(self, slot: Slot, save_id: str, started: float) -> None:
        """Let a rank die in the middle of its save; another start of it saves again."""
        holder = self._producer("actor", slot.rank)
        expired = LeaseExpired(
            holder=holder, lease=15.0, attempts=(ExpiredAttempt(save_id=save_id, slot=slot),)
        )
        # After the lease of 15 s.
        self.plan_event(started + 17.4, ("reducer", 0), expired)
        self.restart("actor", slot.rank, started + 20)
        self._save(slot.step, slot.rank, started + 26, 6.5, again=1)

    def _straggler(self, step: int, length: float, generated: float) -> tuple[float, float]:
        """Let one explorer's reward call hang: the trainer waits, then asks for the group again."""
        if step != 23:
            return length, generated
        # Long enough for both processes to report their waits.
        delay, late = 46.0, ("explorer", 17)
        ordinal = (step - 1) * _PROMPTS + 31
        self.plan_event(
            generated + 5,
            ("trainer", 0),
            WaitStarted(
                wait_id=f"t{step}",
                what=f"the experiences of step {step}: 63 of 64 groups",
                waits_for=("explorer-17",),
                seconds=5.0,
                deadline=300.0,
            ),
        )
        self.plan_event(
            generated + 3,
            late,
            WaitStarted(
                wait_id=f"r{step}",
                what=f"the reward of group {ordinal}",
                waits_for=("reward-2",),
                seconds=9.0,
                deadline=60.0,
            ),
        )
        again = ReissuedRollout(ordinal=ordinal, attempt=2, reason="deadline")
        self.plan_event(
            generated + delay - 6,
            ("trainer", 0),
            RolloutsDispatched(reissued=(again,), oldest=self._get_oldest(step)),
        )
        ended = WaitEnded(wait_id=f"r{step}", outcome="deadline", seconds=60.0)
        self.plan_event(generated + delay - 5.8, late, ended)
        over = WaitEnded(wait_id=f"t{step}", outcome="over", seconds=delay)
        self.plan_event(generated + delay, ("trainer", 0), over)
        bound, trained_at = self._alarms.stalled_after, self._trained_at
        assert bound is not None and trained_at is not None
        stall = self._alarms.judge_stall(step, bound, "waiting-rollouts")
        assert stall is not None
        self.plan_event(trained_at + bound - self.clock / 1000, ("trainer", 0), stall)
        return length + delay, generated + delay

    def _is_cut_off(self, step: int, rank: int) -> bool:
        """Return True for the explorers of a node that the network lost, and for late ones."""
        late = {20: 116, 21: 118, 44: 119}
        return (70 <= step < 78 and 24 <= rank < 32) or step > late.get(rank, step)

    def _oddities(self, step: int, publish: float) -> None:
        """Plan what does not hold a run up: repeated events, garbage, a group that went away."""
        if step == 34:
            opened = VersionOpened(step=step, ranks=tuple(self._ranks), transport="redis")
            self.plan_event(publish + 0.3, ("actor", 0), opened, repeat=True)
        if step == 46:
            self.plan_event(
                publish + 1, ("trainer", 0), b"\x93\x01\x02 not an event of this contract"
            )
        if step == 75:
            detached = ConsumerDetached(
                group="eval-nightly",
                stream="announcements",
                position=f"{int(self.clock) - 600_000}-0",
                pending=12,
                idle=3600.0,
                oldest_pending=f"{int(self.clock) - 900_000}-0",
            )
            self.plan_event(2, ("reducer", 0), detached)

    def _crash(self, step: int) -> int:
        """Let the trainer die; it resumes from the last whole checkpoint. Return the next step."""
        from_step = 80  # the checkpoint of step 90 lacks a save: a disk was full
        self.clock += 61_000
        self.epoch += 1
        self._resumed_step = from_step
        self.restart("trainer", 0)
        for rank in self._ranks:
            self.restart("actor", rank)
        for rank in range(self.plan.explorers):
            self.restart("explorer", rank)
        self._alarms, self._trained_at = AlarmJudge(_THRESHOLDS), None
        checkpoint = StepRef(1, from_step)
        resumed = RunResumed(step=from_step, checkpoint=checkpoint, transport=_TRANSPORT)
        self.plan_event(0, ("trainer", 0), resumed)
        for rank in range(self.plan.explorers):
            self.plan_event(0.5, ("explorer", rank), ExplorerStatusChanged(status="running"))
        filtered = 2 * len([number for number in range(1, from_step + 1) if number % 7 == 0])
        total = from_step * _PROMPTS
        ledger = TrainedLedger(
            step=from_step,
            mark=total,
            next=total,
            trained=total - filtered,
            dropped={"filtered": filtered},
            fingerprint=_FINGERPRINT,
        )
        self.plan_event(0.1, ("trainer", 0), LedgerRestored(ledger=ledger, digest=ledger.digest))
        self.clock += 3000
        return from_step + 1

    def _ends_waiting(self, step: int) -> None:
        """End the record in the middle of a step that is held up, as a look at a live run would."""
        first = (step - 1) * _PROMPTS
        trainer = ("trainer", 0)
        oldest = self._get_oldest(step)
        ordinals = ((first, first + _PROMPTS - 1),)
        self.plan_event(0.1, trainer, RolloutsDispatched(ordinals=ordinals, oldest=oldest))
        waits = [
            (
                14.0,
                trainer,
                f"the experiences of step {step}: 61 of 64 groups",
                ("explorer-29", "explorer-41"),
                600.0,
            ),
            (16.0, ("explorer", 29), f"the reward of group {first + 12}", ("reward-1",), 120.0),
            (17.0, ("explorer", 41), f"tool call 3 of episode {first + 40}", ("sandbox-7",), 180.0),
            (19.0, ("explorer", 3), "a request: none is open", ("trainer-0",), None),
        ]
        for at, who, what, named, deadline in waits:
            wait_id = f"{who[0]}{who[1]}-{step}"
            self.plan_event(
                at,
                who,
                WaitStarted(
                    wait_id=wait_id, what=what, waits_for=named, seconds=6.0, deadline=deadline
                ),
            )
        slot = Slot(step=step - 1, kind="state_dict", role="actor", rank=9, name="model")
        expected = Registration(registration_id=f"sd-{step - 1}", kind="state_dict", expected=2)
        self.plan_event(1, trainer, ThreadCountRegistered(step=step - 1, registration=expected))
        self.plan_event(2, ("actor", 9), SaveStarted(save_id=f"sd-{step}", slot=slot, lease=15.0))
        self.plan_event(
            2.2, trainer, StepCommitted(step=step - 1, kind="state_dict", registrations=(expected,))
        )
        half = SaveProgressed(save_id=f"sd-{step}", slot=slot, bytes=_SHARD // 3, total=_SHARD)
        self.plan_event(18, ("actor", 9), half)
        self.clock += 31_000


_TRANSPORT = ChosenTransport(name="redis", reason="the explorers are on other hosts")


def _digest(epoch: int, step: int, rank: int) -> str:
    return f"sha256:{(epoch << 48) + (step << 16) + rank:064x}"


def _get_share(total: int, rank: int, explorers: int) -> int:
    """Return the part of an explorer; the parts of all add up to the total."""
    return total // explorers + (rank < total % explorers)
