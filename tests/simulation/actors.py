"""Those who take part in a simulated run. What they are made of is the real thing where it can
run on one event loop: the reducer's whole process, publishers, attempts, subscriptions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import anyio

from tests.simulation.network import Line
from tests.simulation.network import Process as Life
from tests.simulation.plan import Save, Worker
from trinity_events.coordinator.save_attempt import SaveAttempt
from trinity_events.errors import GroupDetached, TurnNotGranted
from trinity_events.log import AsyncPublisher
from trinity_events.log.publishing.async_publisher import opening_envelope
from trinity_events.log.retry import backoff_delays, is_transient
from trinity_events.reducer import FoldLimits
from trinity_events.reducer import process as reducer_process
from trinity_events.reducer.policy import Policy
from trinity_events.subscriptions.subscription import subscription_on
from trinity_schemas import (
    Process,
    Registration,
    RunOpened,
    RunResumed,
    SaveRequested,
    Slot,
    StepCommitted,
    ThreadCountRegistered,
    VersionOpened,
    VersionPartPublished,
)

if TYPE_CHECKING:
    from tests.simulation.world import World

T = TypeVar("T")

RUN = "simulated"
GROUP = "eval"
LEASE = 3.0
STEP_DEADLINE = 8.0
CLAIM_AFTER = 2.0
TURN_DEADLINE = 60.0
ASK_AGAIN = 15.0
"""Seconds after which a save that waits for its turn asks once more."""
HANDLING = 0.05
"""Seconds that a member of the group spends on an event."""
DIGEST = "sha256:" + "0" * 64


async def reducer(world: World, life: Life) -> None:
    plan = world.plan
    fold = FoldLimits(
        batch_entries=plan.batch,
        turn_entries=max(1, plan.batch // 2),
        snapshot_entries=plan.snapshots,
        page_entries=plan.batch,
    )
    policy = Policy(step_deadline=STEP_DEADLINE, group_idle=plan.group_idle, fold=fold)
    await reducer_process.reduce_run(Line(world, life), RUN, None, policy=policy)


async def trainer(world: World, life: Life) -> None:
    """Opens the run, or resumes it; hands out the saves of each step and commits it."""
    line, plan = Line(world, life), world.plan
    resumed = world.resumes_from()
    event = RunOpened(save_strategy=plan.strategy)
    if resumed is not None:
        event = RunResumed(step=resumed, save_strategy=plan.strategy)
    epoch = await patiently(lambda: line.open_epoch(opening_envelope(RUN, event)))
    fleet = [world.hire(number, worker, epoch) for number, worker in enumerate(plan.workers)]
    publisher = AsyncPublisher(line, epoch, world.producer("trainer", 0))
    for step in sorted({save.step for save in plan.saves if save.step > (resumed or 0)}):
        of_step = [save for save in plan.saves if save.step == step]
        for save in of_step:
            fleet[save.worker].hand(save)
        for kind in sorted({save.kind for save in of_step}, reverse=True):
            of_kind = [save for save in of_step if save.kind == kind]
            await _commit(publisher, step, kind, of_kind, registers_all=plan.registers_all)
        await anyio.sleep(plan.pause)
    world.trained = epoch


async def _commit(
    publisher: AsyncPublisher, step: int, kind: str, saves: list[Save], *, registers_all: bool
) -> None:
    registrations = ()
    if kind == "weights":
        ranks = tuple(save.worker for save in saves)
        await publisher.publish(VersionOpened(step=step, ranks=ranks, transport="memory"))
    else:
        expected = len({(save.worker, save.name) for save in saves})
        # Saves say how many ranks make one of their name; of names they know nothing.
        if not registers_all and len({save.name for save in saves}) == 1:
            expected = 1
        registration = Registration(registration_id=f"r-{kind}", kind=kind, expected=expected)
        await publisher.publish(ThreadCountRegistered(step=step, registration=registration))
        registrations = (registration,)
    await publisher.publish(StepCommitted(step=step, kind=kind, registrations=registrations))


async def patiently(question: Callable[[], Awaitable[T]]) -> T:
    """The answer of a server that may be away for a while."""
    for pause in backoff_delays(1.0):
        try:
            return await question()
        except Exception as error:
            if not is_transient(error):
                raise
        await anyio.sleep(pause)
    raise AssertionError("pauses end")


class SimulatedWorker:
    """A process that saves: what the coordinator does in threads, in tasks."""

    def __init__(self, world: World, life: Life, number: int, worker: Worker, epoch: int) -> None:
        self._world = world
        self._life = life
        self._number = number
        self.epoch = epoch
        self._line = Line(world, life)
        producer = world.producer("actor", number, worker.node)
        self.publisher = AsyncPublisher(self._line, epoch, producer)
        self._process = Process(host=worker.node, pid=worker.pid, started=epoch)
        self._heart = Heart(self._line, producer.incarnation)
        self._names: dict[str, anyio.Lock] = {}
        self._handed: list[Save] = []
        self._more = anyio.Event()
        self._world.lives[producer.incarnation] = life

    def hand(self, save: Save) -> None:
        """The trainer dispatches a save."""
        if not self._life.dead:
            self._handed.append(save)
            self._world.under_way.setdefault(self._life, set()).add(save)
            self._more.set()

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._heart.beat)
            while True:
                await self._more.wait()
                self._more = anyio.Event()
                handed, self._handed = self._handed, []
                for save in handed:
                    tasks.start_soon(self._do, save)

    async def _do(self, save: Save) -> None:
        if save.kind == "weights":
            await self._publish_part(save)
        else:
            # Saves of one name follow each other.
            async with self._names.setdefault(save.name, anyio.Lock()), self._heart.beating():
                await self._save(save)
        self._world.under_way[self._life].discard(save)

    async def _publish_part(self, save: Save) -> None:
        await self._work(save)
        if save.ends == "finished":
            part = VersionPartPublished(
                step=save.step,
                rank=self._number,
                manifest_digest=DIGEST,
                bytes=1,
                tensors=1,
                chunks=1,
            )
            await self.publisher.publish(part)

    async def _work(self, save: Save) -> None:
        await anyio.sleep(save.seconds / 2)
        if save.ends == "killed":
            self._life.kill()
        await anyio.sleep(save.seconds / 2)

    async def _save(self, save: Save) -> None:
        limited = self._world.plan.strategy != "unrestricted"
        slot = Slot(step=save.step, kind=save.kind, role="actor", rank=self._number, name=save.name)
        save_id = self._world.name("save")
        self._world.attempts[save_id] = self.epoch
        attempt = SaveAttempt(
            save_id,
            slot,
            lease=LEASE,
            process=self._process if limited else None,
            ranks=self._world.ranks_of(save),
        )
        request = attempt.begin()
        await self.publisher.publish(request)
        if attempt.stage == "waiting":
            if not await self._turn(request):
                self._world.no_turn(self.epoch, attempt)
                error = TurnNotGranted("no turn came", 1.0, run_id=RUN, step=save.step)
                await self.publisher.publish(attempt.fail(error))
                return
            await self.publisher.publish(attempt.granted())
        with self._world.saving(self._life, attempt.save_id, self.epoch, self._process):
            await self._work(save)
        if save.ends == "failed":
            await self.publisher.publish(attempt.fail(OSError("disk full")))
        else:
            await self.publisher.publish(attempt.finish(nbytes=1, seconds=save.seconds))

    async def _turn(self, request: SaveRequested) -> bool:
        for _ in range(int(TURN_DEADLINE / ASK_AGAIN)):
            line, save_id = self._line, request.save_id
            if await patiently(lambda: line.granted(save_id, ASK_AGAIN)):  # noqa: B023
                return True
            # It may have been taken for dead meanwhile, and out of the queue.
            await self.publisher.publish(request)
        return False


class Heart:
    """Beats while any save is under way, every third of the lease; then rests."""

    def __init__(self, line: Line, incarnation: str) -> None:
        self._line = line
        self._incarnation = incarnation
        self._saves = 0
        self._busy = anyio.Event()
        self._heard = anyio.Event()

    def beating(self) -> Beating:
        return Beating(self)

    async def enter(self) -> None:
        self._saves += 1
        self._busy.set()
        with anyio.move_on_after(1.0):
            await self._heard.wait()

    def leave(self) -> None:
        self._saves -= 1
        if not self._saves:
            self._busy = anyio.Event()

    async def beat(self) -> None:
        faults = backoff_delays(LEASE / 3)
        while True:
            await self._busy.wait()
            try:
                await self._line.renew_heartbeat(self._incarnation, LEASE)
                self._heard.set()
                pause, faults = LEASE / 3, backoff_delays(LEASE / 3)
            except Exception as error:
                if not is_transient(error):
                    raise
                pause = next(faults)
            with anyio.move_on_after(pause):
                while self._saves:
                    await anyio.sleep(pause / 4)
                self._heard = anyio.Event()
                await patiently(lambda: self._line.clear_heartbeat(self._incarnation))


class Beating:
    """For the time of one save."""

    def __init__(self, heart: Heart) -> None:
        self._heart = heart

    async def __aenter__(self) -> None:
        await self._heart.enter()

    async def __aexit__(self, *_: object) -> None:
        self._heart.leave()


async def follower(world: World, life: Life) -> None:
    """Follows the announcements; goes on after the last one that it wrote down."""
    line = Line(world, life)
    start = world.followed[-1] if world.followed else world.plan.follower
    async with subscription_on(
        lambda: nullcontext(line), RUN, start=start, group=None, deadline=None, claim_after=1.0
    ) as events:
        async for delivery in events:
            world.followed.append(delivery.entry_id)


async def member(world: World, life: Life) -> None:
    """A member of a group; of one that was given up as idle, again from where it had come to."""
    start = "beginning"
    while True:
        try:
            await _take_part(world, Line(world, life), start)
        except GroupDetached:
            start = world.first_left()


async def _take_part(world: World, line: Line, start: str) -> None:
    """Take a moment over each event, then acknowledge it."""
    async with subscription_on(
        lambda: nullcontext(line),
        RUN,
        start=start,
        group=GROUP,
        deadline=None,
        claim_after=CLAIM_AFTER,
    ) as events:
        async for delivery in events:
            await anyio.sleep(HANDLING)
            world.handled.add(delivery.entry_id)
            await delivery.ack()
