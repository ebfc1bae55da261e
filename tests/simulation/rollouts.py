"""Simulation of rollouts: the real dispatcher, explorers' clients, ledger, fold and audit.

Only the server is a model (``rollout_server.py``), and the clock jumps. Trainers and explorers die
at any call, before or after the server has done it, or stand still there and wake up later.
Explorers answer twice, late, malformed, or never; connections break, and the streams vanish. In
half of the runs the tokens of answers are payloads in a store, which may vanish too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from random import Random
from typing import Any

import anyio
import redis
from msgspec import structs

from tests.simulation import clock
from tests.simulation.rollout_server import RolloutClientOfServer, RolloutServer
from tests.support.payloads import MemoryPayloads
from tests.support.rollout_histories import RUN, Count, count_raw
from tests.support.rollout_parts import reward_error_of, samples_of, settings
from trinity_events.analysis.audit import Auditor, LineageBooks
from trinity_events.core import Monitor, MonitorState
from trinity_events.core.ledger import Ledger, ordinals
from trinity_events.core.saved_ledgers import find_ledger_difference
from trinity_events.errors import PublishError, StaleEpoch
from trinity_events.log import AsyncPublisher, Entry, MemoryEventLog
from trinity_events.log.publishing.async_publisher import opening_envelope
from trinity_events.rollouts import AnswerGroup, Claim, RolloutClient, RolloutDispatcher
from trinity_events.rollouts.dispatcher import always
from trinity_events.rollouts.payloads import PayloadFault, load_group
from trinity_events.system.error_text import ungrouped
from trinity_schemas import (
    LedgerRestored,
    Producer,
    RunOpened,
    RunResumed,
    StepRef,
    TrainedLedger,
    decode_envelope,
)

STEPS = 6
PER_STEP = 2
LEASE = 10.0
REQUEST_DEADLINE = 60.0
PATIENCE = 500.0
"""Seconds of virtual time after which a step that did not get its groups is stuck."""
END = 10_000.0
"""Seconds of virtual time after which a run is stuck."""
EXPLORERS = "abc"


class Died(Exception):
    """The process ended here."""


@dataclass
class Fate:
    """End of a process: it dies at a call, or stands still there and wakes up later."""

    call: int
    after: bool
    """True if the server has done the call before."""
    wakes: bool


@dataclass
class Checkpoint:
    """Files of a step: the model, which is the list of what it was trained on, and the ledger."""

    at: StepRef
    model: list[int]
    ledger: TrainedLedger
    entries: int
    """Number of the log's entries when the step was told."""


class Life:
    """One life of a process, through which each of its calls to the server passes."""

    def __init__(self, world: World, name: str, fate: Fate | None) -> None:
        self.gone = anyio.Event()
        """Set once it does not go on, or slept while others went on."""
        self._world, self._name, self._fate = world, name, fate
        self._calls = 0
        self._dead = False

    async def call(
        self, name: str, question: Callable[[], Awaitable[Any]], *, faults: bool = True
    ) -> Any:
        """Make a call, at which the process may end, or its connection break."""
        if self._dead:
            raise Died
        self._calls += 1
        # At the first call from there on that no broken connection prevents.
        due = self._fate is not None and self._calls >= self._fate.call
        ends = due and not self.gone.is_set()
        await anyio.sleep(self._world.random.random() * 0.01)
        if ends and not self._fate.after:
            await self._end(name)
        if faults and self._world.breaks():
            raise redis.ConnectionError("refused")
        reply = await question()
        if ends and self._fate.after:
            await self._end(name)
        if faults and self._world.breaks():
            raise redis.ConnectionError("the reply was lost")
        return reply

    async def _end(self, name: str) -> None:
        fate = self._fate
        who = self._name.partition("-")[0]
        self._world.ends[who, name, "after" if fate.after else "before"] += 1
        self._world.woken += fate.wakes
        self.gone.set()
        if not fate.wakes:
            self._dead = True
            raise Died
        await anyio.sleep(self._world.random.uniform(1.0, 10 * LEASE))

    def client(self) -> Any:
        """Return a client of the server."""
        return RolloutClientOfServer(self._world.server, RUN, self.call)

    def payloads(self) -> Any:
        """Return the store of payloads; None if the run has none."""
        return MortalPayloads(self._world.payloads, self) if self._world.has_payloads else None


class MortalPayloads:
    """Store of payloads as a process has it that may die."""

    transport = "redis"

    def __init__(self, store: MemoryPayloads, life: Life) -> None:
        self._store, self._life = store, life

    async def write(self, payloads: Any) -> None:
        """Write payloads."""
        await self._life.call("payload-write", lambda: self._store.write(payloads))

    async def renew(self, names: Any, seconds: float) -> set[str]:
        """Renew leases."""
        there: set[str] = await self._life.call(
            "payload-renew", lambda: self._store.renew(names, seconds)
        )
        return there

    async def free(self, names: Any) -> None:
        """Delete payloads."""
        await self._life.call("payload-free", lambda: self._store.free(names))


class MortalLog:
    """Log as a process has it that may die."""

    def __init__(self, log: MemoryEventLog, life: Life) -> None:
        self._log, self._life = log, life
        self.run_id = log.run_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def append(self, payload: bytes) -> str:
        """Append an event."""
        entry_id: str = await self._life.call("append", lambda: self._log.append(payload))
        return entry_id


@dataclass
class World:
    """A run from its opening to its last step, with everything that may go wrong on the way."""

    seed: int
    ends: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Number of processes that ended at a call: who, which call, before or after."""
    discarded: int = 0
    woken: int = 0
    returned: int = 0
    """Number of steps whose groups were returned, as payloads were gone."""
    stale: int = 0
    """Number of trainers and explorers that were told of a newer epoch."""
    wrong: list[str] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    """All that were ever saved."""
    model: list[int] = field(default_factory=list)
    ledger: Ledger | None = None
    """Ledger of the last trainer; None while none has come to its end."""

    def run(self) -> World:
        """Run until the last step is trained and every ordinal has a fate."""
        clock.run(self._run, self.seed)
        return self

    async def _run(self) -> None:
        self.random = Random(self.seed)
        now = anyio.current_time
        self.log = MemoryEventLog(RUN, clock=lambda: clock.BEGINNING + now(), timer=now)
        self.server = RolloutServer(self.log.epoch_now, now)
        self.payloads = MemoryPayloads(now)
        self._losses = Random(f"payloads of {self.seed}")
        self.has_payloads = self._losses.random() < 0.5
        self.saved: list[Checkpoint] = []
        self.standing: set[StepRef] = set()
        self.given = {
            "order": self.random.choice(["ordinal", "arrival"]),
            "keep_answers": self.random.choice(["trained", "checkpoint"]),
            "claim_lease": LEASE,
            "request_deadline": REQUEST_DEADLINE,
            "on_reward_error": "drop_group",
            "max_consecutive_failures": 100,
            "max_attempts": self.random.choice([1, 3, 100]),
            "prompts_per_step": PER_STEP,
        }
        self._faulty = self.random.random() < 0.5
        with anyio.fail_after(END):
            async with anyio.create_task_group() as tasks:
                for name in EXPLORERS:
                    tasks.start_soon(self._explore, name)
                tasks.start_soon(self._disturb)
                if self.has_payloads and self._losses.random() < 0.5:
                    tasks.start_soon(self._lose_payloads)
                for _ in range(self.random.randrange(1, 5)):
                    await self._trainer(tasks, self._fate(60))
                while self.ledger is None:  # An old one may wake up, and open the newest epoch.
                    await self._trainer(tasks, None)
                tasks.cancel_scope.cancel()

    def _fate(self, calls: int) -> Fate:
        chance = self.random
        return Fate(chance.randrange(1, calls), chance.random() < 0.5, chance.random() < 0.3)

    def breaks(self) -> bool:
        """Return True if a connection breaks now."""
        return self._faulty and self.random.random() < 0.02

    async def _disturb(self) -> None:
        """Let the streams vanish, and the server restart, now and then."""
        while True:
            await anyio.sleep(self.random.uniform(5, 200))
            if self.random.random() < 0.3:
                self.server.vanish()
            self.server.restart()

    async def _lose_payloads(self) -> None:
        """Let all payloads vanish, now and then."""
        while True:
            await anyio.sleep(self._losses.uniform(1, 40))
            self.payloads.vanish()

    # --- trainers ------------------------------------------------------------------------------

    async def _trainer(self, tasks: Any, fate: Fate | None) -> None:
        """Let a trainer live until it is done, dead or asleep."""
        life = Life(self, "trainer", fate)

        async def live() -> None:
            with suppress(Died, StaleEpoch, PublishError):
                await TrainerLife(self, life).run()
            life.gone.set()

        tasks.start_soon(live)
        await life.gone.wait()

    # --- explorers -----------------------------------------------------------------------------

    async def _explore(self, name: str) -> None:
        """Explore in one life after the other, under one name."""
        while True:
            mortal = self.random.random() < 0.7
            life = Life(self, f"explorer-{name}", self._fate(60) if mortal else None)
            explorer = RolloutClient(
                life.client(),
                RUN,
                max(self.log.epoch_now(), 1),
                name,
                lease=LEASE,
                payloads=life.payloads(),
            )
            try:
                await self._live(explorer)
            except Died:
                await anyio.sleep(self.random.choice([0.0, 0.1, 2 * LEASE]))
            except StaleEpoch:
                self.stale += 1
            self.discarded += explorer.discarded

    async def _live(self, explorer: RolloutClient) -> None:
        for _ in range(self.random.randrange(1, 30)):
            for claim in await explorer.claim(self.random.choice([1, 3]), seconds=5.0):
                await self._serve(explorer, claim)
        await explorer.leave()
        await anyio.sleep(self.random.choice([0.0, LEASE]))

    async def _serve(self, explorer: RolloutClient, claim: Claim) -> None:
        samples = samples_of(claim, explorer.name)
        conduct = {"answer": 12, "late": 1, "twice": 2, "fail": 1, "forget": 1, "malformed": 1}
        conduct["unjudged"] = 1
        match self.random.choices([*conduct], [*conduct.values()])[0]:
            case "answer":
                async with explorer.renewing([claim]):
                    await anyio.sleep(self.random.random() ** 4 * 2 * LEASE)
                    await explorer.answer(claim, samples)
            case "late":
                await anyio.sleep(1.5 * LEASE)
                await explorer.answer(claim, samples)
            case "twice":
                await explorer.answer(claim, samples)
                if await explorer.answer(claim, samples):
                    self.wrong.append("a second answer counted")
            case "malformed":
                # Under a name that has no other answer, so that none of the explorers is excluded.
                name = f"invented-{self.random.random()}"
                await explorer.answer(
                    claim,
                    [structs.replace(sample, explorer=name, reward=inf) for sample in samples],
                )
            case "fail":
                await explorer.fail(claim, "by chance")
            case "unjudged":
                await explorer.fail(claim, "by chance", reward_error_of(claim, explorer.name))


class TrainerLife:
    """One life of the trainer, from the opening of an epoch on."""

    def __init__(self, world: World, life: Life) -> None:
        self.world, self.life, self.random = world, life, world.random
        self.model: list[int] = []
        self.step = 0
        self._unsaved: tuple[StepRef, list[int], int] | None = None

    async def run(self) -> None:
        """Resume, train, and give every ordinal its fate if this is the last life."""
        dispatcher = await self._resume()
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(dispatcher.watch_claims)
                await self._take_steps(dispatcher)
                tasks.cancel_scope.cancel()

    async def _take_steps(self, dispatcher: RolloutDispatcher) -> None:
        last = self.step + self.random.randrange(1, STEPS)
        while self.step < last or self.life._fate is not None:
            behind = self.random.randrange(3)
            await dispatcher.dispatch(self.random.randrange(PER_STEP + 3), self._version(behind))
            groups = await self._take(dispatcher, PER_STEP, self._judge)
            self._save(dispatcher)
            await anyio.sleep(self.random.choice([0.0, 0.0, 2 * LEASE]))
            await self._train(dispatcher, groups)
        while dispatcher.ledger.open_count:
            await self._train(dispatcher, await self._take(dispatcher, 1))
        self.world.model, self.world.ledger = self.model, dispatcher.ledger

    async def _take(
        self, dispatcher: RolloutDispatcher, count: int, usable: Any = always
    ) -> list[AnswerGroup]:
        """Return the groups of a step, whose payloads its ranks have loaded."""
        while True:
            groups = await dispatcher.take(count, deadline=PATIENCE, usable=usable)
            faults = await self.life.call("load", partial(self._load, groups), faults=False)
            if not faults:
                return groups
            self.world.returned += 1
            await dispatcher.return_groups(groups, faults)

    async def _load(self, groups: list[AnswerGroup]) -> list[PayloadFault]:
        world, faults = self.world, []
        for group in groups:
            if group.payload is None:
                continue
            references: Any = group.experiences
            [payload] = world.payloads.read([references[0].payload])
            loaded = load_group(references, payload)
            if isinstance(loaded, PayloadFault):
                faults.append(loaded)
                newest = self.epoch == world.log.epoch_now()
                if loaded.kind != "missing" or (
                    newest and group.payload not in world.payloads.lost
                ):
                    world.wrong.append(f"deleted before its fate: {loaded}")
        return faults

    async def _resume(self) -> RolloutDispatcher:
        world = self.world
        checkpoint = self.random.choice(world.saved[-2:]) if world.saved else None
        event = RunResumed(step=0) if world.log.epoch_now() else RunOpened()
        if checkpoint is not None:
            event = RunResumed(step=checkpoint.at.step, checkpoint=checkpoint.at)
        opening = opening_envelope(RUN, event)
        self.epoch = await self.life.call(
            "open_epoch", lambda: self._opened(opening, checkpoint), faults=False
        )
        name = f"trainer-of-{self.epoch}"
        producer = Producer(role="trainer", rank=0, node="here", incarnation=name)
        log: Any = MortalLog(world.log, self.life)
        publisher = AsyncPublisher(log, self.epoch, producer, deadline=PATIENCE)
        ledger = Ledger()
        if checkpoint is not None:
            self.model, self.step = list(checkpoint.model), checkpoint.at.step
            restored = LedgerRestored(ledger=checkpoint.ledger, digest=checkpoint.ledger.digest)
            await publisher.publish(restored)
            ledger = Ledger.restored(checkpoint.ledger)
        dispatch = settings(RUN, self.epoch, window=self.random.choice([2, 5, 9]), **world.given)
        dispatcher = RolloutDispatcher(
            self.life.client(),
            publisher,
            dispatch,
            ledger,
            deadline=PATIENCE,
            payloads=self.life.payloads(),
        )
        await dispatcher.start()
        return dispatcher

    async def _opened(self, opening: Any, checkpoint: Checkpoint | None) -> int:
        """Open the epoch; what was saved, and published, after its checkpoint is discarded."""
        world = self.world
        epoch = await world.log.open_epoch(opening)
        # Without a checkpoint the newest epoch goes on that began at step 0.
        begun = [version for version in world.standing if version.step == 0]
        at = checkpoint.at if checkpoint is not None else max(begun, default=StepRef(0, 0))
        world.saved = [checkpoint for checkpoint in world.saved if checkpoint.at <= at]
        world.standing = {version for version in world.standing if version <= at} | {
            StepRef(epoch, at.step)
        }
        return epoch

    def _version(self, behind: int) -> StepRef:
        """Return a version that stands, some steps behind the newest one."""
        ours = [version for version in sorted(self.world.standing) if version.epoch == self.epoch]
        return ours[-1 - min(behind, len(ours) - 1)] if ours else StepRef(self.epoch, self.step)

    def _judge(self, _: AnswerGroup) -> bool | str:
        return self.random.choices([True, "stale", "filtered"], [16, 1, 1])[0]

    async def _train(self, dispatcher: RolloutDispatcher, groups: list[AnswerGroup]) -> None:
        if self.epoch == self.world.log.epoch_now():
            used = {
                experience.oldest_version for group in groups for experience in group.experiences
            }
            if strange := used - self.world.standing:
                self.world.wrong.append(f"trained on versions that do not stand: {strange}")
            rewards = [sample.reward for group in groups for sample in group.experiences]
            if not all(map(isfinite, rewards)):
                self.world.wrong.append(f"trained on a malformed answer: {rewards}")
        self.model += [group.ordinal for group in groups]
        await dispatcher.trained(self.step + 1, groups)
        self.step += 1
        at = StepRef(self.epoch, self.step)
        if self.epoch == self.world.log.epoch_now():
            self.world.standing.add(at)
        if self.random.random() < 0.5:
            entries = len(self.world.log.read_now(limit=10**6))
            self._unsaved = at, list(self.model), entries
            if self.random.random() < 0.5:
                self._save(dispatcher)
        await dispatcher.checkpointed(self.world.saved[-1].at.step if self.world.saved else 0)

    def _save(self, dispatcher: RolloutDispatcher) -> None:
        """Save the checkpoint of the step before, unless the run has gone on without this one."""
        if self._unsaved is None:
            return
        (at, model, entries), self._unsaved = self._unsaved, None
        ledger = dispatcher.ledger_at(at.step)
        if self.epoch == self.world.log.epoch_now():
            self.world.saved.append(Checkpoint(at, model, ledger, entries))
            self.world.checkpoints.append(self.world.saved[-1])


def audited(world: World) -> tuple[LineageBooks, MonitorState]:
    """Return the books of the audit, and the state of the fold."""
    auditor, monitor = Auditor(RUN), Monitor(MonitorState(run_id=RUN))
    for entry in world.log.read_now(limit=10**6):
        auditor.add(decode_envelope(entry.payload))
        monitor.apply(entry.id, decode_envelope(entry.payload))
    return auditor.audit().lineages[-1], monitor.state


def counted(world: World) -> Count:
    """Return the count of a counter that shares no code with the pipeline."""
    return count_raw(entry.payload for entry in world.log.read_now(limit=10**6))[-1]


def simulate(seed: int) -> list[str]:
    """Return everything that is wrong with the run of a seed."""
    world = World(seed)
    try:
        world.run()
    except Exception as error:
        return [f"the run ended with {error!r}"]
    return faults(world)


def faults(world: World) -> list[str]:
    """Return everything that is wrong with a run: by model, audit, fold and counter."""
    books, state = audited(world)
    count = counted(world)
    problems = [
        *world.wrong,
        *(contradiction.name for contradiction in books.contradictions),
        *count.wrong,
    ]
    problems += [name for name in state.anomaly_counts if name not in ("stale-epoch", "duplicate")]
    model, ledger = Counter(world.model), world.ledger
    problems += [
        f"{ordinal} is in the model {times} times" for ordinal, times in model.items() if times > 1
    ]
    trained = {ordinal for ordinal, fate in count.fates.items() if fate == "trained"}
    if ledger is None:
        return [*problems, "the run did not end"]
    if count.open or count.next != ledger.next:
        problems.append(
            f"lost: {count.open} of {count.next}, and the trainer counts to {ledger.next}"
        )
    if not ledger.trained == len(model) == books.trained == count.trained:
        problems.append(f"{len(model)} in the model, {books.trained} in the audit, {count.trained}")
    if ledger.dropped != dict(count.dropped):
        problems.append(f"dropped {ledger.dropped}, and the counter says {dict(count.dropped)}")
    if trained and trained != model.keys():
        problems.append("the model has other ordinals than the log")
    if count.next != count.trained + count.dropped.total():
        problems.append("a prompt has no fate")
    return problems + [
        words for checkpoint in world.checkpoints for words in contradictions(world, checkpoint)
    ]


def contradictions(world: World, checkpoint: Checkpoint) -> list[str]:
    """Return what a checkpoint's ledger says otherwise than the log did at its step."""
    entries = world.log.read_now(limit=checkpoint.entries)
    count, ledger = count_raw(entry.payload for entry in entries)[-1], checkpoint.ledger
    fated = {*range(ledger.mark), *ordinals(ledger.settled)}
    ledger_sums = fated, ledger.trained, dict(ledger.dropped)
    if ledger_sums != (count.fates.keys(), count.trained, dict(count.dropped)):
        return [f"the ledger of {checkpoint.at} differs from the log: {ledger_sums}, {count}"]
    difference = find_ledger_difference(ledger, _fold(entries).ledger or Ledger())
    if difference is not None:
        return [f"a resume would refuse the ledger of {checkpoint.at}: {difference}"]
    return []


def _fold(entries: Iterable[Entry]) -> MonitorState:
    monitor = Monitor(MonitorState(run_id=RUN))
    for entry in entries:
        monitor.apply(entry.id, decode_envelope(entry.payload))
    return monitor.state
