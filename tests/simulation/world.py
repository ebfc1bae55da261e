"""A simulated run: starts everybody, sees what they do, and says what went wrong."""

from __future__ import annotations

import secrets
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

import anyio

from tests.properties.oracle import complete
from tests.simulation import actors, clock
from tests.simulation.network import Process as Life
from tests.simulation.network import chance
from tests.simulation.plan import Fault, Plan, Save, Worker
from trinity_events import replay
from trinity_events.core import Monitor, MonitorState
from trinity_events.log import MemoryEventLog, Stream
from trinity_events.log.position import position
from trinity_events.reducer import background_job, reducer
from trinity_events.reducer import process as reducer_process
from trinity_events.subscriptions import group_member
from trinity_schemas import (
    LeaseExpired,
    Process,
    Producer,
    SaveFailed,
    SaveFinished,
    SaveGranted,
    StepReady,
    decode_envelope,
    encode,
)

BOUND = 120.0
"""Seconds of virtual time after which whoever is not done is stuck."""
_LOOK = 0.5
_ALL = 10**9


class World:
    """One run of a plan, and everything that is known of it."""

    def __init__(self, plan: Plan, loop_time: Callable[[], float]) -> None:
        self.plan = plan
        self.log = MemoryEventLog(
            actors.RUN, clock=lambda: clock.BEGINNING + loop_time(), timer=loop_time
        )
        self.violations: list[str] = []
        self.trained = 0
        self.epoch = 0
        self.under_way: dict[Life, set[Save]] = {}
        self.lives: dict[str, Life] = {}
        self.attempts: dict[str, int] = {}
        self.hampered: dict[str, float] = {}
        self.followed: list[str] = []
        self.handled: set[str] = set()
        self._follows_from: str | None = None
        self._acked: set[str] = set()
        self._dealt_with: set[str] = set()
        self._expired: set[str] = set()
        self._over: set[str] = set()
        self._saving: dict[str, tuple[Life, int, Process]] = {}
        self._calls: Counter[str] = Counter()
        self._names: Counter[str] = Counter()
        self._faults = {(fault.who, fault.of, fault.call): fault for fault in plan.faults}
        self._tasks: Any = None
        self._monitor = Monitor(MonitorState(run_id=actors.RUN))

    # --- what the processes ask -------------------------------------------------------------

    def chance(self, name: str) -> Random:
        return chance(self.plan.seed, f"{name}/{self._calls[name]}")

    def name(self, what: str) -> str:
        """A name that is never used again, and the same in every run of the plan."""
        self._names[what] += 1
        return f"{what}-{self._names[what]}"

    def ranks_of(self, save: Save) -> int:
        """How many workers make a save of the same name."""
        at = (save.step, save.kind, save.name)
        return len(
            {save.worker for save in self.plan.saves if (save.step, save.kind, save.name) == at}
        )

    def producer(self, role: str, rank: int, node: str = "north") -> Producer:
        return Producer(role=role, rank=rank, node=node, incarnation=self.name(f"{role}-{rank}"))

    def next_fault(self, who: str, call: str) -> Fault | None:
        """What is to befall a process at this call, if anything."""
        self._calls[who] += 1
        self._calls[f"{who} {call}"] += 1
        anyhow = self._faults.get((who, "", self._calls[who]))
        return anyhow or self._faults.get((who, call, self._calls[f"{who} {call}"]))

    def server_away(self) -> tuple[bool, float]:
        """Whether the server is away, and else in how many seconds it will be."""
        now, comes = anyio.current_time(), float("inf")
        for outage in self.plan.outages:
            if outage.at <= now < outage.at + outage.seconds:
                return True, 0.0
            if now < outage.at:
                comes = min(comes, outage.at - now)
        return False, comes

    def resumes_from(self) -> int | None:
        """Where a trainer goes on: at the last ready checkpoint, or one step before it."""
        if not self.epoch:
            return None
        pointer = self._known_now().state.ready.get("checkpoint")
        step = 0 if pointer is None else pointer.at.step
        return max(0, step - self.chance("resume").choice((0, 0, 1)))

    def hire(self, number: int, worker: Worker, epoch: int) -> actors.SimulatedWorker:
        """Start a worker of an epoch; those of older ones go on, and find out."""
        name = f"worker-{number}" if f"worker-{number}" not in self._names else ""
        life = Life(self, name or f"worker-{number}.{epoch}", epoch)
        self._names[f"worker-{number}"] += 1
        process = actors.SimulatedWorker(self, life, number, worker, epoch)
        self._tasks.start_soon(self._live, life, process.run)
        return process

    # --- what is seen -----------------------------------------------------------------------

    def saw(self, life: Life, call: str, args: tuple[Any, ...], result: Any) -> None:
        """The server has done what a process asked for."""
        if call == "open_epoch":
            self.epoch = result
        elif call == "append":
            self._saw_event(args[0])
        elif call == "append_leading" and result is not None:
            self._saw_event(args[1])
        elif call == "last_id" and life.name == "follower" and not self.followed:
            self._follows_from = result
        elif call == "ack":
            self._acked.add(args[2])
            self._dealt_with.add(args[2])
        elif call == "destroy_group" and result:
            self._acked.clear()  # where it is created again, it may begin before these
        elif call in ("read_group", "claim"):
            given = result if call == "read_group" else result.entries
            for entry in given:
                if entry.id in self._acked:
                    self.violations.append(f"{entry.id} was acknowledged and given out again")

    def _saw_event(self, payload: bytes) -> None:
        event = decode_envelope(payload).event
        if isinstance(event, SaveFinished | SaveFailed):
            self._over.add(event.save_id)
        elif isinstance(event, LeaseExpired):
            self._check_death(event)

    def _check_death(self, event: LeaseExpired) -> None:
        life = self.lives[event.holder.incarnation]
        lost = {attempt.save_id for attempt in event.attempts} - self._over
        self._expired |= lost
        excused = self.hampered.get(life.name, -BOUND) + event.lease
        if lost and not life.dead and anyio.current_time() > excused:
            self.violations.append(f"{life.name} lives, and was taken for dead: {event}")

    @contextmanager
    def saving(self, life: Life, save_id: str, epoch: int, process: Process) -> Iterator[None]:
        """A worker really writes."""
        self._saving[save_id] = (life, epoch, process)
        groups = {
            self._group(save_id, by)
            for save_id, (who, since, by) in self._saving.items()
            if since == self.epoch and not who.dead and save_id not in self._expired
        }
        if len(groups) > 1:
            self.violations.append(
                f"at {anyio.current_time():.3f} s more than one of {self.plan.strategy} "
                f"saves at once: {sorted(map(str, groups))}"
            )
        try:
            yield
        finally:
            del self._saving[save_id]

    def _group(self, save_id: str, process: Process) -> object:
        return {
            "unrestricted": None,
            "single_thread": save_id,
            "single_process": process,
            "single_node": process.host,
        }[self.plan.strategy]

    def no_turn(self, epoch: int, attempt: Any) -> None:
        if epoch == self.epoch:
            self.violations.append(f"{attempt.what} ({attempt.save_id}) was given no turn")

    # --- the run ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Run to the end, and look at what there is then."""
        async with anyio.create_task_group() as self._tasks:
            start = partial(self._tasks.start_soon, self._lives)
            start("trainer", actors.trainer, 0.5)
            start("reducer-0", actors.reducer, 1.0)
            start("reducer-1", actors.reducer, 1.0)
            if self.plan.follower:
                start("follower", actors.follower, 0.5)
            for number in range(self.plan.members):
                start(f"member-{number}", actors.member, 1.0)
            while (late := self._late()) and anyio.current_time() < BOUND:
                await anyio.sleep(_LOOK)
            self._tasks.cancel_scope.cancel()
        if late:
            self.violations.append(f"stuck after {BOUND:g} s: {late}")
        self._check_announcements()

    async def _lives(
        self, name: str, body: Callable[[World, Life], Awaitable[None]], again_after: float
    ) -> None:
        """A process and those that are started in its place when it is killed."""
        while True:
            life = Life(self, name)
            await self._live(life, partial(body, self, life))
            if not life.dead:
                return
            await anyio.sleep(again_after)

    async def _live(self, life: Life, body: Callable[[], Awaitable[None]]) -> None:
        try:
            with life.scope:
                await body()
        except Exception:
            self.violations.append(f"{life.name} failed: {traceback.format_exc()}")
        if life.dead:
            self.under_way.pop(life, None)

    def _known_now(self) -> Monitor:
        """The fold of all that is in the log."""
        self._monitor.fold(self.log.read_now(self._monitor.state.position, limit=_ALL))
        return self._monitor

    def _late(self) -> str | None:
        """What is still to come, if anything is."""
        if not self.trained or self.trained != self.epoch:
            return "the trainer"
        # Those of an older epoch are fenced, and give up waiting for a turn by their deadline.
        saves = [
            f"{life.name}: {save}"
            for life, of in self.under_way.items()
            for save in of
            if not life.dead and life.epoch == self.epoch
        ]
        if saves:
            return f"saves of {saves}"
        last = self.log.last_id_now()
        if self.log._position != last:
            return f"the reducer, at {self.log._position} of {last}"
        state = self._known_now().state
        for step, step_state in state.steps.items():
            for kind, slot in step_state.kinds.items():
                if slot.committed_at is not None and not slot.settled:
                    return f"{kind} of step {step}"
        return self._late_consumers()

    def _late_consumers(self) -> str | None:
        announced = [
            entry.id for entry in self.log.read_now(stream=Stream.ANNOUNCEMENTS, limit=_ALL)
        ]
        if self.plan.follower:
            start = self._follows_from if self.plan.follower == "current" else "0-0"
            if start is None:
                return "the follower's start"
            due = [entry_id for entry_id in announced if position(entry_id) > position(start)]
            # What stands is told first: it may be newer than what is told after it.
            seen = sorted(
                (entry_id for entry_id in self.followed if position(entry_id) > position(start)),
                key=position,
            )
            if seen != due:
                return f"the follower, at {len(seen)} of {len(due)}"
        if self.plan.members and not self._dealt_with >= set(announced):
            return f"the group, at {len(self._dealt_with)} of {len(announced)}"
        return None

    def first_left(self) -> str:
        """Up to where the group has dealt with everything."""
        last = "0-0"
        for entry in self.log.read_now(stream=Stream.ANNOUNCEMENTS, limit=_ALL):
            if entry.id not in self._dealt_with:
                break
            last = entry.id
        return last

    def _check_announcements(self) -> None:
        """What was announced is what one undisturbed fold of the log says, and nothing else."""
        undisturbed = Monitor(MonitorState(run_id=actors.RUN))
        expected, dead = undisturbed.fold(self.log.read_now(limit=_ALL))
        payloads = [
            entry.payload for entry in self.log.read_now(stream=Stream.ANNOUNCEMENTS, limit=_ALL)
        ]
        if payloads != [encode(announcement) for announcement in expected][: len(payloads)]:
            self.violations.append("what was announced is not what the log says")
        if dead or self.log._dead:
            self.violations.append(f"dead letters: {dead or self.log._dead}")
        self._check_pointers([decode_envelope(payload).event for payload in payloads])
        self._check_proofs(undisturbed.state)
        if lost := self._dealt_with - self.handled:
            self.violations.append(f"acknowledged, and handled by nobody: {sorted(lost)}")
        gaps = undisturbed.state.anomaly_counts.get("gap", 0)
        if gaps:
            self.violations.append(f"{gaps} gaps: an event was lost in silence")

    def _check_proofs(self, state: MonitorState) -> None:
        """What is settled is what the rule says, worked out without the fold's own code."""
        written = [
            (entry.id, decode_envelope(entry.payload)) for entry in self.log.read_now(limit=_ALL)
        ]
        settled = {
            (state.epoch, step, kind)
            for step, step_state in state.steps.items()
            for kind, slot in step_state.kinds.items()
            if slot.outcome is not None
        }
        if settled != complete(written):
            wrong = sorted(settled ^ complete(written))
            self.violations.append(f"settled and not proven, or proven and not settled: {wrong}")

    def _check_pointers(self, events: list[Any]) -> None:
        pointers: dict[str, tuple[int, int]] = {}
        granted: set[str] = set()
        for event in events:
            if isinstance(event, StepReady):
                at = (event.epoch, event.step)
                if at <= pointers.get(event.kind, (0, -1)):
                    self.violations.append(f"{event.kind} went from {pointers[event.kind]} to {at}")
                pointers[event.kind] = at
                strange = [
                    by.save_id for by in event.saves if self.attempts[by.save_id] != event.epoch
                ]
                if strange:
                    self.violations.append(f"{at} rests on saves of another epoch: {strange}")
            elif isinstance(event, SaveGranted):
                if event.save_id in granted:
                    self.violations.append(f"{event.save_id} was granted its turn twice")
                granted.add(event.save_id)


class _Witness:
    """In place of a logger: an error that the code under simulation survives is an error."""

    def __init__(self, world: World) -> None:
        self._world = world

    def error(self, message: str, *args: object) -> None:
        self._world.violations.append(message % args)

    def exception(self, message: str, *args: object) -> None:
        self._world.violations.append(f"{message % args}: {traceback.format_exc()}")

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None


@contextmanager
def _staged(world: World) -> Iterator[None]:
    """The code under simulation as the plan wants it: names that are told."""
    witness, names = _Witness(world), partial(world.name, "name")
    with ExitStack() as patched:
        for module in (background_job, replay, group_member, reducer, reducer_process):
            patched.enter_context(patch.object(module, "logger", witness))
        for owner, name, value in (
            (reducer_process, "RedisEventLog", lambda log, _: log),
            (secrets, "token_hex", lambda *_: names()),
        ):
            patched.enter_context(patch.object(owner, name, value))
        yield


def simulate(plan: Plan) -> list[str]:
    """Run a plan on virtual time; returns what went wrong, which should be nothing."""
    return simulated(plan).violations


def simulated(plan: Plan) -> World:
    """As :func:`simulate`; returns the world as it was left."""

    async def main() -> World:
        world = World(plan, anyio.current_time)
        with _staged(world):
            await world.run()
        return world

    return clock.run(main, plan.seed)
