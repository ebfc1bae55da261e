"""Processes of planted hangs: each is one part of a run, and does what such a part does.

Usage: python -m tests.hangs.actors ROLE URL RUN RANK [WORD ...]; it ends with its standard input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import anyio

from tests.support.rollout_parts import samples_of, settings
from tests.support.waits import PATIENCE
from trinity_events import CheckpointCoordinator, hold_checkpoint, subscribe
from trinity_events.coordinator import staged_path
from trinity_events.diagnostics.stacks import enable_stack_dumps
from trinity_events.diagnostics.waits import WaitReporter
from trinity_events.errors import PublishError, SaveError
from trinity_events.log import AsyncPublisher, Publisher, RedisEventLog, SyncEventLog, new_producer
from trinity_events.rollouts import Claim, RolloutClient, RolloutDispatcher
from trinity_events.server import connect, open_client
from trinity_schemas import (
    ExplorerStatusChanged,
    StepReady,
    StepRef,
    TrainerStatusChanged,
    VersionOpened,
    VersionPartPublished,
)

EPOCH = 1
THRESHOLD = 0.5
"""Seconds after which waits are reported, so that forty plants take minutes."""
LONG = 600.0
LEASE = 3.0
"""Seconds of the heartbeats of saves."""
DIGEST = f"sha256:{'3' * 64}"


def say(word: str) -> None:
    """Tell the stage how far this process is."""
    print(word, flush=True)


class Actor:
    """Part of a run with its publisher, whose waits are reported soon."""

    def __init__(self, role: str, url: str, run: str, rank: int, exits: ExitStack) -> None:
        self.url, self.run, self.rank, self.name = url, run, rank, f"{role}-{rank}"
        enable_stack_dumps(run, self.name)
        log = SyncEventLog(exits.enter_context(open_client(url)), run)
        self.publisher = Publisher(log, EPOCH, new_producer(role, rank))
        owner = self.publisher.producer.incarnation
        self.waits = WaitReporter(self.publisher, threshold=THRESHOLD, run_id=run, owner=owner)
        self.publisher.waits = self.waits  # type: ignore[misc]
        exits.callback(self._close)

    def _close(self) -> None:
        with suppress(PublishError):
            self.publisher.close(0.1)


# --- the trainer ---------------------------------------------------------------------------------


def trainer(me: Actor, what: str, *words: str) -> None:
    me.publisher.publish(TrainerStatusChanged(status="running", step=0))
    me.publisher.flush(PATIENCE)
    if what == "rollouts":
        anyio.run(dispatch, me, *words)
    elif what == "commits":
        anyio.run(commit, me, *words)
    elif what == "opens":
        open_version(me, *words)
    elif what == "group":
        collective_sender(me)
    say("idle")
    time.sleep(LONG)


async def dispatch(me: Actor, verdict: str = "all") -> None:
    """Ask for rollouts, and take steps on them, as far as they come."""
    async with connect(me.url) as client:
        publisher = AsyncPublisher(RedisEventLog(client, me.run), EPOCH, new_producer("trainer"))
        dispatch = settings(me.run, EPOCH, claim_lease=LONG, window=64)
        dispatcher = RolloutDispatcher(client, publisher, dispatch, waits=me.waits)
        await dispatcher.start()
        oldest = 1 if verdict == "stale" else -1
        usable = (lambda group: "filtered") if verdict == "filtered" else (lambda group: True)
        await dispatcher.dispatch(2, StepRef(EPOCH, 0))
        say("dispatched")
        groups = await dispatcher.take(2, deadline=LONG, usable=usable, oldest=oldest)
        await dispatcher.trained(1, groups)
        say("trained")


async def commit(me: Actor, folder: str, kind: str, expected: str, announced: str = "") -> None:
    """Register the saves of step 1, and commit it; then wait for its announcement."""
    coordinator = CheckpointCoordinator(me.publisher, Path(folder) / me.run)
    whole = kind == "checkpoint"
    await coordinator.register_and_monitor(
        1,
        is_state_dict=not whole,
        state_dict_thread_count=0 if whole else int(expected),
        checkpoint_thread_count=int(expected) if whole else 0,
    )
    say("committed")
    if announced:
        await until_ready(me, kind, "the announcement of step 1", ())


def open_version(me: Actor, ranks: str) -> None:
    """Open the version of step 1, as rank 0 of a trainer does."""
    opened = VersionOpened(step=1, ranks=tuple(range(int(ranks))), transport="memory")
    me.publisher.publish(opened)
    me.publisher.flush(PATIENCE)
    say("opened")


async def until_ready(me: Actor, kind: str, what: str, names: tuple[str, ...]) -> None:
    with me.waits.waiting(what, names, deadline=LONG, step=1):
        async with subscribe(me.run, StepReady, start="beginning", redis_url=me.url) as events:
            async for event in events:
                if event.event.kind == kind:
                    return say("ready")


# --- ranks that save ---------------------------------------------------------------------------


def rank(me: Actor, folder: str, kind: str, how: str, ranks: str = "0", strategy: str = "") -> None:
    """Save one part of step 1: `save`, `hang` in the save, or write to a `full` disk."""
    coordinator = CheckpointCoordinator(
        me.publisher,
        Path(folder) / me.run,
        lease=LEASE,
        **({"strategy": strategy} if strategy else {}),
    )
    path = staged_path(Path(folder) / me.run, EPOCH, 1) / f"{kind}-{me.rank}.pt"

    def save() -> None:
        say("saving")
        path.parent.mkdir(parents=True, exist_ok=True)
        if how == "hang":
            fifo = path.with_suffix(".fifo")
            os.mkfifo(fifo)
            fifo.read_bytes()  # no process ever writes to it
        (Path("/dev/full") if how == "full" else path).write_bytes(b"weights" * 1000)

    options: dict[str, Any] = {"ranks": int(ranks)} if int(ranks) else {}
    coordinator.save_async("model", save, 1, kind == "state_dict", path=path, **options)
    try:
        coordinator.wait_all(LONG)
        say("saved")
    except SaveError as error:
        say(f"failed {error}")
    me.publisher.flush(PATIENCE)
    time.sleep(LONG)


def publisher_rank(me: Actor, how: str) -> None:
    """Publish this rank's part of the weights of step 1, or never come to it."""
    if how == "publishes":
        me.publisher.publish(
            VersionPartPublished(
                step=1, rank=me.rank, manifest_digest=DIGEST, bytes=8, tensors=1, chunks=1
            )
        )
        me.publisher.flush(PATIENCE)
        say("published")
    say("computes")
    time.sleep(LONG)


# --- explorers ---------------------------------------------------------------------------------


def explorer(me: Actor, what: str, *words: str) -> None:
    me.publisher.publish(ExplorerStatusChanged(status="running"))
    me.publisher.flush(PATIENCE)
    if what == "weights":
        say("waits")
        anyio.run(until_ready, me, "weights", "the weights of step 1", ("trainer-0",))
        time.sleep(LONG)
    elif what == "idle":
        say("idle")
        time.sleep(LONG)
    elif what == "group":
        collective_receiver(me)
    else:
        anyio.run(answer, me, what, *words)


async def answer(me: Actor, how: str, place: str = "") -> None:
    """Claim requests one by one, and answer them as a real explorer does: judged by a reward."""
    async with ExplorerParts(me, how, place) as judge, connect(me.url) as client:
        requests = RolloutClient(client, me.run, EPOCH, me.name, lease=LONG)
        while True:
            for claim in await requests.claim(1, seconds=5.0):
                say("claimed")
                async with requests.renewing([claim]):
                    await judge(claim)
                    await requests.answer(claim, samples_of(claim, me.name))


class ExplorerParts:
    """Parts of an explorer between a claim and its answer."""

    def __init__(self, me: Actor, how: str, place: str) -> None:
        self._me, self._how, self._place = me, how, place

    async def __aenter__(self) -> Callable[[Claim], Any]:
        if self._how == "quick":
            return lambda claim: anyio.sleep(0)
        if self._how == "slow":
            return lambda claim: anyio.sleep(LONG)
        made: Callable[[Claim], Any] = await getattr(self, f"_{self._how}")()
        return made

    async def __aexit__(self, *_: object) -> None:
        pass

    async def _reward(self) -> Callable[[Claim], Any]:
        from tests.support.judging_explorer import ANSWER, QUESTION
        from trinity_workers.rewards import RewardPool, RewardSource

        source = RewardSource(reward=self._place, task="sums", deadline=LONG)
        pool = RewardPool(source, processes=1, waits=self._me.waits)
        await pool.start()
        return lambda claim: pool.judge(QUESTION, [ANSWER])

    async def _service(self) -> Callable[[Claim], Any]:
        from trinity_workers.rewards.http_calls import HttpCalls

        calls = HttpCalls(
            f"the reward service {self._place}",
            deadline=LONG,
            attempts=1,
            calls=1,
            waits=self._me.waits,
        )
        return lambda claim: calls.post(self._place, {}, json.loads)

    async def _environment(self) -> Callable[[Claim], Any]:
        from tests.support.judging_explorer import QUESTION
        from trinity_workers.sandbox.environments import EnvironmentProcesses

        environment = EnvironmentProcesses(
            self._place, deadline=LONG, count=1, waits=self._me.waits
        )
        await environment.__aenter__()
        return lambda claim: environment.reply(QUESTION, [])

    async def _paused(self) -> Callable[[Claim], Any]:
        from trinity_workers.rollout_engines.gate import Gate

        gate = Gate(self._me.waits)
        gate.pause(LONG)

        def generate() -> None:
            with gate.moving():
                pass

        return lambda claim: anyio.to_thread.run_sync(generate)


# --- weights by way of the server of chunks, and a collective group -------------------------------


def synchronizer(me: Actor, role: str, weights_url: str = "", **options: Any) -> Any:
    from trinity_events import Synchronizer

    return Synchronizer(
        me.run,
        EPOCH if role == "actor" else 0,
        redis_url=me.url,
        weights_url=weights_url or me.url,
        role=role,
        rank=me.rank,
        **options,
    )


def weights_rank(me: Actor, weights_url: str, go: str) -> None:
    """Publish the weights of step 1 to the server of chunks, once a file says so."""
    import torch

    made = synchronizer(me, "actor", weights_url)
    made._session.events.waits = me.waits
    made.open_version(1)
    say("opened")
    wait_for(Path(go))
    tensors = [(str(number), torch.zeros(1 << 18)) for number in range(4)]
    made.publish(tensors, 1)
    made.commit(1)
    made.flush()
    say("published")
    time.sleep(LONG)


def weights_explorer(me: Actor, weights_url: str, go: str) -> None:
    """Load the weights of step 1 from the server of chunks, once a file says so."""
    import torch
    from torch import nn

    made = synchronizer(me, "explorer", weights_url)
    made._session.events.waits = me.waits
    made.report(ExplorerStatusChanged(status="running"))
    ready = anyio.run(ready_weights, me)
    module = nn.ParameterDict({str(number): torch.zeros(1 << 18) for number in range(4)})
    made.load(module, ready)
    say("waits")
    wait_for(Path(go))
    made.load(module, ready)
    say("loaded")
    time.sleep(LONG)


async def ready_weights(me: Actor) -> StepReady:
    async with subscribe(me.run, StepReady, start="beginning", redis_url=me.url) as events:
        async for event in events:
            if event.event.kind == "weights":
                return event.event
    raise AssertionError("the subscription ended")


def collective_sender(me: Actor) -> None:
    made = synchronizer(me, "actor", transport="collective")
    made._session.events.waits = me.waits
    say("waits")
    made.setup_weight_sync_group(2, timeout=LONG)


def collective_receiver(me: Actor) -> None:
    made = synchronizer(me, "explorer")
    made.join_weight_sync_group()
    say("joined")
    time.sleep(LONG)


def wait_for(path: Path) -> None:
    give_up = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < give_up, f"{path} was not made"
        time.sleep(0.02)


# --- consumers ---------------------------------------------------------------------------------


def member(me: Actor, group: str) -> None:
    """Read what is announced as a member of a group, and acknowledge nothing."""
    anyio.run(_member, me, group)


async def _member(me: Actor, group: str) -> None:
    async with subscribe(me.run, group=group, start="beginning", redis_url=me.url) as events:
        async for _ in events:
            say("read")
            await anyio.sleep(LONG)


def reader(me: Actor, folder: str) -> None:
    """Hold the checkpoint of step 1."""
    anyio.run(_reader, me, folder)


async def _reader(me: Actor, folder: str) -> None:
    async with hold_checkpoint(me.run, 1, redis_url=me.url, checkpoint_root=Path(folder)):
        say("holds")
        await anyio.sleep(LONG)


ROLES: dict[str, tuple[str, Callable[..., None]]] = {
    "trainer": ("trainer", trainer),
    "rank": ("actor", rank),
    "publisher": ("actor", publisher_rank),
    "weights-rank": ("actor", weights_rank),
    "explorer": ("explorer", explorer),
    "weights-explorer": ("explorer", weights_explorer),
    "member": ("consumer", member),
    "reader": ("reader", reader),
}


def _end_with_input() -> None:
    while os.read(0, 64):
        pass
    os._exit(0)


def main(kind: str, url: str, run: str, number: str, *words: str) -> None:
    """Be one part of a run, until standard input ends."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    role, act = ROLES[kind]
    with ExitStack() as exits:
        act(Actor(role, url, run, int(number), exits), *words)


if __name__ == "__main__":
    main(*sys.argv[1:])
