"""Saves in turns: real processes, a real server, and a reducer that grants."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from itertools import pairwise

import anyio
import anyio.to_thread
import pytest
import redis

from tests.support.errors import assert_attributes, raises
from tests.support.event_histories import committed, registration
from tests.support.pipeline import reducer_task
from tests.support.redis_servers import servers
from tests.support.waits import PATIENCE
from trinity_events import CheckpointCoordinator
from trinity_events.coordinator import SaveTimeouts
from trinity_events.errors import SaveError, StaleEpoch, TurnNotGranted
from trinity_events.log import (
    AsyncPublisher,
    Publisher,
    RedisEventLog,
    Stream,
    SyncEventLog,
    new_producer,
    open_run,
)
from trinity_events.replay import Replay, current_state, read_all
from trinity_events.server import connect, open_client
from trinity_schemas import (
    ExpiredAttempt,
    LeaseExpired,
    SaveFailed,
    SaveFinished,
    SaveGranted,
    SaveRequested,
    SaveStarted,
    StepCommitted,
    StepFailed,
    StepReady,
    StepSuperseded,
    WaitEnded,
    WaitStarted,
    decode_envelope,
)

pytestmark = pytest.mark.server

STEP = 7


# --- a worker in a process of its own -------------------------------------------------------


def serve(redis_url, run_id, strategy, rank, host, lease):
    """Save what standard input says for as long as it says, and tell on standard output."""
    socket.gethostname = lambda: host
    gates = defaultdict(threading.Event)

    telling = threading.Lock()

    def tell(what, name):
        with telling:
            print(what, name, time.monotonic(), flush=True)

    def save(name):
        tell("began", name)
        gates[name].wait(PATIENCE)
        tell("ended", name)

    with open_client(redis_url) as client:
        publisher = Publisher(SyncEventLog(client, run_id), 1, new_producer("actor", int(rank)))
        coordinator = CheckpointCoordinator(publisher, strategy=strategy, lease=float(lease))
        for line in sys.stdin:
            verb, name = line.split()
            if verb == "save":
                coordinator.save_async(name, lambda name=name: save(name), STEP)
            else:
                gates[name].set()
        coordinator.wait_all(PATIENCE)
        publisher.close()


class Worker:
    def __init__(self, process):
        self.process = process
        self.moments = {}
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            what, name, moment = line.split()
            self.moments[what, name] = float(moment)

    def say(self, *lines):
        for line in lines:
            self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    async def began(self, *names):
        with anyio.fail_after(PATIENCE):
            while not all(("began", name) in self.moments for name in names):
                await anyio.sleep(0.01)

    async def finish(self):
        """Let it end by itself."""
        self.process.stdin.close()
        with anyio.fail_after(PATIENCE):
            while self.process.poll() is None:
                await anyio.sleep(0.01)
        assert self.process.returncode == 0

    def end(self):
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def worker(redis_url, run_id):
    """Starts workers."""
    started = []

    def start(strategy, rank=0, host="here", lease=15.0):
        arguments = (redis_url, run_id, strategy, str(rank), host, str(lease))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.coordinator.test_save_admission", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(Worker(process))
        return started[-1]

    yield start
    for process in started:
        process.end()


# --- what became of it ----------------------------------------------------------------------


def names(state, save_ids):
    return [state.attempts[save_id].slot.name for save_id in save_ids]


async def until(log, condition):
    """The state, as soon as the condition holds."""
    with anyio.fail_after(PATIENCE):
        while not condition(state := await current_state(log)):
            await anyio.sleep(0.01)
    return state


async def waiting(log, *expected):
    """Wait until exactly these wait for their turn, in this order."""

    def condition(state):
        return [name for group in state.queue.values() for name in names(state, group)] == [
            *expected
        ]

    await until(log, condition)


async def until_announced(log, kind, count=1):
    with anyio.fail_after(PATIENCE):
        while True:
            events = [
                event
                async for entry in read_all(log, Stream.ANNOUNCEMENTS)
                if isinstance(event := decode_envelope(entry.payload).event, kind)
            ]
            if len(events) >= count:
                return events
            await anyio.sleep(0.01)


async def groups_in_turn(log):
    """Who had a turn at the same time, over the whole run: sets of names, each when it changed."""
    replay, groups = Replay(log.run_id), []
    async for entry in read_all(log):
        replay.feed([entry])
        state = replay.state
        having = set(names(state, state.turns))
        if not groups or having != groups[-1]:
            groups.append(having)
    assert set(replay.state.anomaly_counts) == set(), replay.state.anomalies
    return groups


def moments(*workers):
    """When each save began and ended, by name."""
    times = {key: moment for worker in workers for key, moment in worker.moments.items()}
    return {name: (times["began", name], times["ended", name]) for _, name in times}


def overlap(span, other):
    return span[0] < other[1] and other[0] < span[1]


# --- strategies over processes --------------------------------------------------------------


@pytest.mark.processes
async def test_single_thread_lets_one_save_run_at_a_time_first_come_first_served(
    client, redis_url, log, run_id, worker
):
    await open_run(client, run_id, save_strategy="single_thread")
    first, second = worker("single_thread", 0), worker("single_thread", 1)
    async with reducer_task(redis_url, run_id):
        first.say("save a")
        await first.began("a")
        order = [(second, "b"), (first, "c"), (second, "d"), (first, "e")]
        for index, (who, name) in enumerate(order):
            who.say(f"save {name}")
            await waiting(log, *(name for _, name in order[: index + 1]))
        first.say("end a", "end c", "end e")
        second.say("end b", "end d")
        await first.finish()
        await second.finish()
        await until(log, lambda state: not state.attempts)
    times = sorted(moments(first, second).items(), key=lambda item: item[1])
    assert [name for name, _ in times] == ["a", "b", "c", "d", "e"]
    assert not any(overlap(before[1], after[1]) for before, after in pairwise(times))
    assert [group for group in await groups_in_turn(log) if group] == [
        {"a"},
        {"b"},
        {"c"},
        {"d"},
        {"e"},
    ]


async def check_groups(log, first, second):
    """Two workers per group: a group's saves run together, another group's after them."""
    (worker_a, a), (worker_b, b) = first
    (worker_c, c), (worker_d, d) = second
    worker_a.say(f"save {a}")
    await worker_a.began(a)
    worker_b.say(f"save {b}")
    await worker_b.began(b)  # while the first goes on
    worker_c.say(f"save {c}")
    await waiting(log, c)
    worker_d.say(f"save {d}")
    await waiting(log, c, d)
    worker_a.say("save late")  # its group has the turn, but must not keep it while another waits
    await waiting(log, c, d, "late")
    worker_a.say(f"end {a}")
    await until(log, lambda state: names(state, state.turns) == [b])
    await waiting(log, c, d, "late")
    worker_b.say(f"end {b}")
    await worker_c.began(c)
    await worker_d.began(d)  # both at once
    worker_c.say(f"end {c}")
    worker_d.say(f"end {d}")
    worker_a.say("end late")
    await worker_a.began("late")
    workers = {worker_a, worker_b, worker_c, worker_d}
    for worker in workers:
        await worker.finish()
    await until(log, lambda state: not state.attempts)
    times = moments(*workers)
    assert overlap(times[a], times[b])
    assert overlap(times[c], times[d])
    for before in (a, b):
        assert not any(overlap(times[before], times[after]) for after in (c, d, "late"))
    assert not any(overlap(times[before], times["late"]) for before in (c, d))


@pytest.mark.processes
async def test_single_process_lets_the_saves_of_one_real_process_run_together(
    client, redis_url, log, run_id, worker
):
    await open_run(client, run_id, save_strategy="single_process")
    # Both on one host: it is the process that counts.
    first, second = worker("single_process", 0), worker("single_process", 1)
    async with reducer_task(redis_url, run_id):
        await check_groups(log, [(first, "a"), (first, "b")], [(second, "c"), (second, "d")])


@pytest.mark.processes
async def test_single_node_lets_the_processes_of_one_host_run_together(
    client, redis_url, log, run_id, worker
):
    await open_run(client, run_id, save_strategy="single_node")
    first, second = (worker("single_node", rank, host="left") for rank in (0, 1))
    third, fourth = (worker("single_node", rank, host="right") for rank in (2, 3))
    async with reducer_task(redis_url, run_id):
        await check_groups(log, [(first, "a"), (second, "b")], [(third, "c"), (fourth, "d")])


@pytest.mark.processes
async def test_a_worker_that_is_killed_in_its_turn_is_failed_by_its_lease_and_the_turn_passes_on(
    client, redis_url, log, run_id, worker
):
    await open_run(client, run_id, save_strategy="single_thread")
    first, second = worker("single_thread", 3, lease=3.0), worker("single_thread", 4)
    async with reducer_task(redis_url, run_id):
        first.say("save a")
        await first.began("a")
        second.say("save b")
        await until(log, lambda state: len(state.attempts) == 2)
        first.process.kill()
        await second.began("b")
        [failure, *_] = await until_announced(log, StepFailed)
        assert failure.step == STEP
        assert failure.reason.startswith("a of actor-3")
        assert "nothing was heard of actor-3 on here for 3 s" in failure.reason
        second.say("end b")
        await second.finish()


@pytest.mark.processes
async def test_a_save_that_finishes_after_its_lease_expired_counts(
    client, redis_url, log, run_id, worker
):
    epoch = await open_run(client, run_id, save_strategy="single_thread")
    trainer = AsyncPublisher(log, epoch, new_producer("trainer"))
    saver = worker("single_thread", lease=1.0)
    async with reducer_task(redis_url, run_id):
        saver.say("save a")
        await saver.began("a")
        saver.process.send_signal(signal.SIGSTOP)
        await until_announced(log, StepFailed)
        saver.process.send_signal(signal.SIGCONT)
        saver.say("end a")
        await saver.finish()
        await trainer.publish(committed(STEP, "checkpoint", registration("checkpoint")))
        [ready] = await until_announced(log, StepReady)
        assert (ready.step, [proof.slot.name for proof in ready.saves]) == (STEP, ["a"])


# --- within one process ---------------------------------------------------------------------


class Log(SyncEventLog):
    """A log whose server can be away, or refuse."""

    fault: Exception | None = None
    queries = 0
    """How often it was asked for a grant."""

    def append_many(self, payloads):
        self._reach()
        return super().append_many(payloads)

    def granted(self, save_id, seconds):
        self.queries += 1
        self._reach()
        return super().granted(save_id, seconds)

    def renew_heartbeat(self, incarnation, lease):
        self._reach()
        super().renew_heartbeat(incarnation, lease)

    def _reach(self):
        if self.fault is not None:
            raise self.fault


AWAY = SaveTimeouts(first_heartbeat=0.01)
"""For a server that is away, whose first heartbeat would be waited for in vain."""


@pytest.fixture
def coordinate(sync_client, run_id):
    """Makes coordinators, each of a publisher of its own."""
    made = []

    def make(strategy="single_thread", rank=0, **options):
        publisher = Publisher(Log(sync_client, run_id), 1, new_producer("actor", rank))
        made.append((publisher, CheckpointCoordinator(publisher, strategy=strategy, **options)))
        return made[-1][1]

    yield make
    for publisher, coordinator in made:
        publisher.log.fault = None
        coordinator.wait_all(PATIENCE)
        publisher.close()


async def in_thread(call, *args, **named):
    """Off the event loop, which is the reducer's too."""
    return await anyio.to_thread.run_sync(lambda: call(*args, **named))


async def read_events(log):
    """The events of the log, without reports of waits that lasted."""
    events = [decode_envelope(entry.payload).event async for entry in read_all(log)]
    return [event for event in events if not isinstance(event, WaitStarted | WaitEnded)]


async def test_the_whole_save_runs_within_its_turn(client, redis_url, log, run_id, coordinate):
    """Invariant 2 of coordinator.py."""
    await open_run(client, run_id, save_strategy="single_thread")
    coordinator = coordinate()
    async with reducer_task(redis_url, run_id):

        def save():
            [started] = [
                event
                for entry in coordinator._publisher.log.read(stream=Stream.ANNOUNCEMENTS)
                if isinstance(event := decode_envelope(entry.payload).event, SaveGranted)
            ]
            assert started.slot.name == "save_sync"

        await in_thread(coordinator.save_sync, save, STEP)
        await in_thread(coordinator.wait_all)
    kinds = [type(event) for event in (await read_events(log))[1:]]
    assert kinds == [SaveRequested, SaveStarted, SaveFinished]


async def test_saves_of_two_names_in_one_process_run_one_after_the_other(
    client, redis_url, log, run_id, coordinate
):
    await open_run(client, run_id, save_strategy="single_thread")
    coordinator, alone = coordinate(), threading.Lock()

    def save():
        assert alone.acquire(blocking=False), "two at once"
        time.sleep(0.01)
        alone.release()

    def step():
        for step in range(3):
            coordinator.save_async("model", save, step)
            coordinator.save_async("optimizer", save, step)
            coordinator.save_sync(save, step)
        coordinator.wait_all(PATIENCE)

    async with reducer_task(redis_url, run_id):
        await in_thread(step)
    assert sum(isinstance(event, SaveFinished) for event in await read_events(log)) == 9
    assert max(map(len, await groups_in_turn(log))) == 1


async def test_a_save_that_fails_gives_its_turn_up(client, redis_url, log, run_id, coordinate):
    await open_run(client, run_id, save_strategy="single_thread")
    first, second = coordinate(rank=0), coordinate(rank=1)
    async with reducer_task(redis_url, run_id):
        release, ran = threading.Event(), []

        def fail():
            release.wait(PATIENCE)
            raise OSError("disk full")

        first.save_async("a", fail, STEP)
        await until(log, lambda state: names(state, state.turns) == ["a"])
        second.save_async("b", lambda: ran.append("b"), STEP)
        await waiting(log, "b")
        release.set()
        await in_thread(second.wait_all, PATIENCE)
        assert ran == ["b"]
        with raises(SaveError, __cause__=re.compile("disk full")):
            await in_thread(first.wait_all, PATIENCE)


async def test_unrestricted_asks_nobody_and_waits_for_nobody(client, log, run_id, coordinate):
    await open_run(client, run_id)
    coordinator, both = coordinate("unrestricted"), threading.Barrier(2)
    for name in ("a", "b"):
        coordinator.save_async(name, lambda: both.wait(PATIENCE), STEP)
    await in_thread(coordinator.wait_all, PATIENCE)  # there is no reducer
    kinds = {type(event) for event in (await read_events(log))[1:]}
    assert kinds == {SaveStarted, SaveFinished}


# --- waiting in vain, and through faults ----------------------------------------------------


async def test_without_a_reducer_the_wait_for_a_turn_ends_with_what_is_missing(
    client, log, run_id, coordinate
):
    await open_run(client, run_id, save_strategy="single_thread")
    coordinator, ran = coordinate(turn_deadline=0.1), []
    coordinator.save_async("a", lambda: ran.append(1), STEP)
    with pytest.raises(SaveError) as caught:
        await in_thread(coordinator.wait_all)
    [failure] = caught.value.failures
    assert isinstance(failure, TurnNotGranted)
    missing = re.compile(f"is a reducer running for run {run_id}")
    assert_attributes(failure, run_id=run_id, step=STEP, last=None, reason=missing)
    assert ran == []
    assert [type(event) for event in (await read_events(log))[1:]] == [SaveRequested, SaveFailed]


async def test_who_waited_in_vain_is_told_who_has_the_turn_and_waits_no_more(
    client, redis_url, log, run_id, coordinate
):
    await open_run(client, run_id, save_strategy="single_thread")
    first, second = coordinate(rank=0), coordinate(rank=1, turn_deadline=0.3)
    release = threading.Event()
    async with reducer_task(redis_url, run_id):
        first.save_async("a", lambda: release.wait(PATIENCE), STEP)
        await until_announced(log, SaveGranted)
        with raises(TurnNotGranted, run_id=run_id, step=STEP, last=f"a of step {STEP} of actor-0"):
            await in_thread(second.save_sync, lambda: None, STEP, name="b")
        await in_thread(second.wait_all, PATIENCE)
        assert isinstance((await read_events(log))[-1], SaveFailed)
        state = await current_state(log)
        assert (names(state, state.turns), state.queue) == (["a"], {})
        release.set()
        await in_thread(first.wait_all, PATIENCE)


async def test_who_was_taken_out_of_the_queue_while_it_stood_still_asks_again(
    client, redis_url, log, run_id, coordinate
):
    epoch = await open_run(client, run_id, save_strategy="single_thread")
    soon = SaveTimeouts(grant_read=0.05, request_again=0.1)
    first, second = coordinate(rank=0), coordinate(rank=1, timeouts=soon)
    release = threading.Event()
    async with reducer_task(redis_url, run_id):
        first.save_async("a", lambda: release.wait(PATIENCE), STEP)
        await until(log, lambda state: names(state, state.turns) == ["a"])
        second.save_async("b", lambda: None, STEP)
        await waiting(log, "b")
        [(save_id, attempt)] = [
            (save_id, attempt)
            for save_id, attempt in (await current_state(log)).attempts.items()
            if attempt.slot.name == "b"
        ]
        lost = ExpiredAttempt(save_id=save_id, slot=attempt.slot)
        clock = AsyncPublisher(log, epoch, new_producer("reducer"))
        await clock.publish(LeaseExpired(holder=attempt.holder, lease=1.0, attempts=(lost,)))
        await waiting(log, "b")
        release.set()
        await in_thread(second.wait_all, PATIENCE)
        await in_thread(first.wait_all, PATIENCE)


async def test_who_waits_for_a_turn_of_an_older_epoch_is_told_of_the_newer(
    client, redis_url, log, run_id, coordinate
):
    await open_run(client, run_id, save_strategy="single_thread")
    first, second = coordinate(rank=0), coordinate(rank=1, turn_deadline=0.1)
    release, opened = threading.Event(), threading.Event()
    second._publisher.log.granted = lambda *_: not opened.wait(PATIENCE)
    async with reducer_task(redis_url, run_id):
        first.save_async("a", lambda: release.wait(PATIENCE), STEP)
        await until(log, lambda state: names(state, state.turns) == ["a"])
        second.save_async("b", lambda: None, STEP)
        await waiting(log, "b")
        await open_run(client, run_id, save_strategy="single_thread")
        await until_announced(log, StepSuperseded)
        opened.set()
        with raises(SaveError) as caught:
            await in_thread(second.wait_all, PATIENCE)
        [error] = caught.value.failures
        assert isinstance(error, StaleEpoch)
        assert_attributes(error, run_id=run_id, epoch=1, newest=2, subject=f"b of step {STEP}")
        release.set()
        await in_thread(first.wait_all, PATIENCE)
    assert not any(isinstance(event, SaveFailed) for event in await read_events(log))


async def test_a_turn_is_waited_for_through_faults_of_the_server(
    client, redis_url, log, run_id, coordinate
):
    await open_run(client, run_id, save_strategy="single_thread")
    coordinator, ran = coordinate(timeouts=AWAY), []
    coordinator._publisher.log.fault = redis.ConnectionError("nobody is there")
    coordinator.save_async("a", lambda: ran.append(1), STEP)
    async with reducer_task(redis_url, run_id):
        with anyio.fail_after(PATIENCE):
            while coordinator._publisher.log.queries < 3:
                await anyio.sleep(0.01)
        coordinator._publisher.log.fault = None
        await in_thread(coordinator.wait_all, PATIENCE)
    assert ran == [1]


async def test_a_turn_is_waited_for_through_a_crash_of_the_server(run_id, tmp_path):
    with servers(tmp_path, 1) as [server], open_client(server.url) as sync_client:
        made = []
        for rank in range(2):
            publisher = Publisher(SyncEventLog(sync_client, run_id), 1, new_producer("actor", rank))
            made.append((publisher, CheckpointCoordinator(publisher, strategy="single_thread")))
        (first, first_coordinator), (second, second_coordinator) = made
        release, ran = threading.Event(), []
        async with connect(server.url) as client, reducer_task(server.url, run_id):
            log = RedisEventLog(client, run_id)
            await open_run(client, run_id, save_strategy="single_thread")
            first_coordinator.save_async("a", lambda: release.wait(PATIENCE), STEP)
            await until(log, lambda state: names(state, state.turns) == ["a"])
            second_coordinator.save_async("b", lambda: ran.append("b"), STEP)
            await waiting(log, "b")
            server.kill()
            release.set()  # it ends while there is no server to tell
            await in_thread(server.start)
            for coordinator in (first_coordinator, second_coordinator):
                await in_thread(coordinator.wait_all, PATIENCE)
            assert ran == ["b"]
            assert [{"a"}, {"b"}] == [names for names in await groups_in_turn(log) if names]
        first.close()
        second.close()


async def test_a_request_that_finds_the_buffer_full_is_made_when_there_is_room(
    client, redis_url, log, run_id, coordinate
):
    await open_run(client, run_id, save_strategy="single_thread")
    coordinator, ran = coordinate(timeouts=AWAY), []
    publisher = coordinator._publisher
    publisher.log.fault = redis.ConnectionError("nobody is there")
    publisher._outbox._capacity = 1
    publisher.publish(StepCommitted(step=STEP, kind="state_dict"))

    def save():
        publisher.flush(PATIENCE)  # makes room for what is said of its end
        ran.append(1)

    coordinator.save_async("a", save, STEP)
    async with reducer_task(redis_url, run_id):
        publisher.log.fault = None
        await in_thread(coordinator.wait_all, PATIENCE)
    assert ran == [1]


@pytest.mark.parametrize("full", [False, True], ids=["buffered", "not even buffered"])
async def test_a_server_that_stays_away_is_named_when_the_turn_does_not_come(
    run_id, coordinate, full
):
    coordinator = coordinate(turn_deadline=0.2, timeouts=AWAY)
    publisher = coordinator._publisher
    publisher.log.fault = redis.ConnectionError("nobody is there")
    if full:
        publisher._outbox._capacity = 0
    unread = re.compile("the server of the log could not be read")
    with raises(TurnNotGranted, run_id=run_id, step=STEP, last=None, reason=unread):
        await in_thread(coordinator.save_sync, lambda: None, STEP)


async def test_a_server_that_refuses_is_not_asked_for_the_whole_deadline(
    run_id, coordinate, monkeypatch
):
    coordinator = coordinate(turn_deadline=3600, timeouts=AWAY)
    with monkeypatch.context() as patch:
        refusal = redis.exceptions.NoPermissionError("no permission for this key")
        patch.setattr(Log, "granted", lambda *_: (_ for _ in ()).throw(refusal))
        with raises(TurnNotGranted, last=None, reason=re.compile("no permission")):
            await in_thread(coordinator.save_sync, lambda: None, STEP)


if __name__ == "__main__":
    serve(*sys.argv[1:])
