"""The reducer against a real server, in its own process where dying is the point.

The numbers are those of the invariants in `trinity_events/reducer/reducer.py`.
"""

import os
import signal
import subprocess
import sys
from functools import partial
from itertools import pairwise

import anyio
import anyio.lowlevel
import pytest

from tests.support.event_histories import committed, finished, registration
from tests.support.pipeline import (
    announced,
    count_announcements,
    publish_steps,
    reducer_process,
    reducer_task,
    until,
)
from tests.support.waits import PATIENCE, child
from trinity_events.core import Monitor, decode_state
from trinity_events.core.limits import KEPT_VERSIONS
from trinity_events.log import (
    AsyncPublisher,
    MemoryEventLog,
    RedisEventLog,
    Stream,
    new_producer,
    open_run,
    opening_envelope,
)
from trinity_events.log.publishing.publisher import EnvelopeFactory
from trinity_events.reducer import (
    FoldLimits,
    Leader,
    Policy,
    Reducer,
    ReducerTimeouts,
    reduce_all,
    reduce_run,
    run_supervisor,
)
from trinity_events.reducer.run_supervisor import _has_more
from trinity_events.replay import Replay, current_state, read_all
from trinity_events.server import EmbeddedServer, connect
from trinity_schemas import RunClosed, RunOpened, StepReady, VersionRetired, encode

pytestmark = pytest.mark.server


async def test_what_became_true_is_announced_with_its_cause(publisher, log, redis_url, run_id):
    async with reducer_task(redis_url, run_id):
        await publisher.publish(committed(1, "state_dict", registration()))
        cause = await publisher.publish(finished(1))
        [ready] = await announced(log, 1)
    assert (ready.kind, ready.step, ready.caused_by) == ("state_dict", 1, cause)


@pytest.mark.processes
async def test_a_reducer_killed_in_the_middle_loses_no_step_and_announces_none_twice(
    publisher, log, redis_url, run_id, tmp_path
):
    """Invariants 1 and 4."""
    kills, steps = 0, 0

    async def publish_until_killed_thrice():
        nonlocal steps
        while kills < 3:
            await publish_steps(publisher, [steps])
            steps += 1
            await anyio.sleep(0.02)  # so few that all stays on the server, where it is counted

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish_until_killed_thrice)
        while kills < 3:
            done = await count_announcements(log)
            with reducer_process(redis_url, run_id, tmp_path), anyio.fail_after(PATIENCE):
                while await count_announcements(log) <= done:
                    await anyio.sleep(0.001)
            # Killed right after its first announcements, wherever it is by now.
            kills += 1
            # Its lease would hold the next one up for three seconds.
            await log._redis.delete(log.keys.leader)
    with reducer_process(redis_url, run_id, tmp_path):
        events = await announced(log, steps + max(0, steps - KEPT_VERSIONS))
    ready = [event.step for event in events if isinstance(event, StepReady)]
    assert ready == list(range(steps))
    retired = [event.step for event in events if isinstance(event, VersionRetired)]
    assert retired == list(range(steps - KEPT_VERSIONS))


async def test_a_key_that_something_else_wrote_is_named_and_makes_nothing_twice(
    publisher, log, redis_url, run_id, caplog
):
    policy = Policy(timeouts=ReducerTimeouts(fault_retry=0.1))
    await log._redis.set(log.keys.current, b"of something else")
    await publish_steps(publisher, [1, 2])
    async with reducer_task(redis_url, run_id, policy=policy):
        await until(lambda: caplog.text.count(f"{log.keys.current} is a string, where") >= 3)
        assert await count_announcements(log) == 0
        sentence = next(record for record in caplog.records if "cannot be folded" in record.message)
        assert sentence.exc_info is None
        await log._redis.delete(log.keys.current)
        assert [event.step for event in await announced(log, 2)] == [1, 2]


async def test_a_replay_gives_the_state_and_the_bytes_of_the_live_reducer(
    publisher, log, redis_url, run_id
):
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, range(20))
        await log.append(b"\xff not an event")
        last = await publisher.publish(RunClosed(reason="finished"))
        with anyio.fail_after(PATIENCE):
            while (await log.load())[1] != last:
                await anyio.sleep(0.01)
    replay = Replay(run_id)
    bytes_announced = []
    async for entry in read_all(log):
        for folded in replay.feed([entry]):
            bytes_announced += [encode(announcement) for announcement in folded.announcements]
    live = [entry.payload async for entry in read_all(log, Stream.ANNOUNCEMENTS)]
    assert bytes_announced == live
    snapshot, position = await log.load()
    assert position == last
    assert decode_state(snapshot) == replay.state == await current_state(log)
    assert replay.state.dead_letters == 1


async def test_a_foreign_entry_goes_to_the_dead_letters_and_the_run_goes_on(
    publisher, log, client, redis_url, run_id
):
    of_another = EnvelopeFactory("another-run", publisher.epoch, new_producer("trainer"))
    async with reducer_task(redis_url, run_id):
        await log.append(b"\x81")
        await log.append(of_another.next(committed(1, "state_dict", registration(expected=0))))
        await publisher.publish(committed(2, "state_dict", registration(expected=0)))
        [ready] = await announced(log, 1)
    assert ready.step == 2
    reasons = [fields[b"reason"].decode() for _, fields in await client.xrange(log.keys.dead)]
    assert "not MessagePack" in reasons[0]
    assert "an event of run 'another-run'" in reasons[1]


async def test_a_second_reducer_takes_over_within_seconds(publisher, log, redis_url, run_id):
    async with reducer_task(redis_url, run_id):
        async with connect(redis_url, retry=False) as own:
            with anyio.move_on_after(0.2):
                await reduce_run(own, run_id, None)  # waits: the other leads
        await publish_steps(publisher, [1])
        await announced(log, 1)
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [2])
        assert [event.step for event in await announced(log, 2)] == [1, 2]


async def test_the_lead_of_one_that_died_is_free_in_time_although_the_clock_was_set_back(log):
    token, _ = await log.lead(0.2)
    await log._redis.pexpire(log.keys.leader, 3_600_000)  # as seen after an hour back
    with anyio.fail_after(PATIENCE):
        assert await Leader(log, ReducerTimeouts(leader_lease=0.2)).acquire() > token


async def test_a_reducer_that_was_overtaken_stops_and_writes_nothing(log, publisher):
    """Invariant 3."""
    token, _ = await log.lead(0.01)
    stale = Reducer(log, None, token)
    await anyio.sleep(0.05)
    await log.lead(5)
    await publish_steps(publisher, [1])
    with anyio.fail_after(PATIENCE):
        await stale.run()  # returns: its first commit is refused
    assert await log.read(stream=Stream.ANNOUNCEMENTS) == []


async def test_a_snapshot_of_another_version_is_folded_anew(publisher, log, redis_url, run_id):
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [1])
        await announced(log, 1)
    await log._redis.set(log.keys.snapshot, b"\x01")
    state = await current_state(log)
    assert state.ready["weights"].at.step == 1


async def test_entries_that_were_lost_are_reported_and_the_run_goes_on(
    publisher, log, redis_url, run_id, caplog
):
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [1])
        await announced(log, 1)
    position = (await log.load())[1]
    await log._redis.xdel(log.keys.events, position)
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [2])
        assert [event.step for event in await announced(log, 2)] == [1, 2]
    assert f"has no entry {position}" in caplog.text


async def test_a_run_that_lost_its_end_is_not_served_over_and_over(publisher, log):
    await publish_steps(publisher, [1])
    assert await _has_more(log)
    for folded in (await log.last_id(), "99999999999999-0"):
        await log._redis.set(log.keys.position, folded)
        assert not await _has_more(log)


async def test_a_run_that_was_closed_is_served_again_when_it_is_opened_again(
    client, redis_url, run_id, log, publisher
):
    async with connect(redis_url, retry=False) as own:
        await publisher.publish(RunClosed(reason="finished"))
        with anyio.fail_after(PATIENCE):
            await reduce_run(own, run_id, None, until_closed=True)  # ends by itself
        epoch = await open_run(client, run_id)
        again = AsyncPublisher(log, epoch, new_producer("trainer"))
        await publish_steps(again, [1])
        await again.publish(RunClosed(reason="finished"))
        with anyio.fail_after(PATIENCE):
            await reduce_run(own, run_id, None, until_closed=True)
    assert [event.step for event in await announced(log, 1)] == [1]


@pytest.mark.processes
async def test_a_reducer_without_a_run_serves_every_run(client, redis_url, tmp_path):
    command = [sys.executable, "-m", "trinity_events", "reducer", "--redis-url", redis_url]
    command += ["--checkpoint-root", str(tmp_path)]
    with child(command, stderr=subprocess.DEVNULL) as process:
        for number in range(2):
            run_id = f"served-{os.getpid()}-{number}"
            log = RedisEventLog(client, run_id)
            epoch = await open_run(client, run_id)
            await publish_steps(AsyncPublisher(log, epoch, new_producer("trainer")), [1])
            assert (await announced(log, 1))[0].step == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


@pytest.mark.processes
async def test_a_reducer_serves_more_runs_than_a_shell_gives_it_files_for(tmp_path):
    command = [sys.executable, "-m", "trinity_events", "reducer", "--checkpoint-root"]
    in_a_shell = ["sh", "-c", 'ulimit -Sn 64; exec "$@"', "sh", *command, str(tmp_path)]
    with EmbeddedServer(tmp_path).attached() as url:
        async with connect(url) as client:
            logs = [RedisEventLog(client, f"one-{number}") for number in range(40)]
            for log in logs:
                trainer = AsyncPublisher(
                    log, await open_run(client, log.run_id), new_producer("trainer")
                )
                await publish_steps(trainer, [1])
            with child([*in_a_shell, "--redis-url", url], stderr=subprocess.PIPE) as reducer:
                for log in logs:
                    await announced(log, 1)
                reducer.terminate()
                stderr = reducer.communicate(timeout=PATIENCE)[1].decode()
    assert not stderr


async def closed_run(client, run_id):
    publisher = AsyncPublisher(
        RedisEventLog(client, run_id), await open_run(client, run_id), new_producer("trainer")
    )
    return await publisher.publish(RunClosed(reason="finished"))


async def test_runs_that_are_over_hold_up_nobody_who_trains(tmp_path):
    async def folded(client, ends):
        snapshots = [await RedisEventLog(client, run).load() for run in ends]
        return [position for _, position in snapshots] == list(ends.values())

    with EmbeddedServer(tmp_path).attached() as url:
        async with connect(url) as client:
            ends = {f"over-{n}": await closed_run(client, f"over-{n}") for n in range(40)}
            for again in (False, True):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(partial(reduce_all, url, run_id=None, root=tmp_path))
                    if not again:
                        await until(lambda: folded(client, ends))
                    else:
                        # One that waits for its look is served at once when it is opened again.
                        epochs = [await open_run(client, name) for name in ("over-39", "new")]
                        for run_id, epoch in zip(("over-39", "new"), epochs, strict=True):
                            log = RedisEventLog(client, run_id)
                            trainer = AsyncPublisher(log, epoch, new_producer("trainer"))
                            await publish_steps(trainer, [1])
                            assert (await announced(log, 1))[0].step == 1
                        led = [key async for key in client.scan_iter("*:leader")]
                        assert 2 <= len(led) <= run_supervisor.AFTERWARDS + 2
                    tasks.cancel_scope.cancel()


class Held(MemoryEventLog):
    """A log that counts the steps it is asked to take, and may refuse one."""

    def __init__(self, run_id, refused=None):
        super().__init__(run_id)
        self.commits, self.refused = [], refused
        self.under_way = 0

    async def commit(self, commit):
        self.under_way += 1
        assert self.under_way == 1, "one at a time"
        self.commits.append(commit)
        await anyio.sleep(0.001)
        self.under_way -= 1
        return len(self.commits) != self.refused and await super().commit(commit)


async def fold_all(log, steps, **limits):
    """Let a reducer fold what is published of so many steps; true when it stopped by itself."""
    publisher = AsyncPublisher(
        log,
        await log.open_epoch(opening_envelope(log.run_id, RunOpened())),
        new_producer("trainer"),
    )
    await publish_steps(publisher, range(steps))
    token, _ = await log.lead(60)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def stop_when_folded():
                await until(lambda: log._position == log.last_id_now())
                scope.cancel()

            tasks.start_soon(stop_when_folded)
            await Reducer(log, None, token, policy=Policy(fold=FoldLimits(**limits))).run()
            tasks.cancel_scope.cancel()
            return True
    return False


async def test_commits_follow_one_another_although_more_is_read_meanwhile(run_id):
    """Invariant 2."""
    log = Held(run_id)
    assert not await fold_all(log, 50, batch_entries=10)
    assert len(log.commits) == 16
    assert [commit.after for commit in log.commits[1:]] == [
        commit.position for commit in log.commits[:-1]
    ]
    replay = Replay(run_id)
    replay.feed(log.read_now(limit=1000))
    assert len(log.read_now(stream=Stream.ANNOUNCEMENTS, limit=1000)) == replay.state.announced


async def test_after_a_commit_that_was_refused_nothing_more_is_sent(run_id):
    """Invariant 3."""
    log = Held(run_id, refused=3)
    assert await fold_all(log, 50, batch_entries=10)
    assert len(log.commits) == 3
    assert log._position == log.commits[1].position


async def test_others_have_their_turns_while_a_long_batch_is_folded(run_id, monkeypatch):
    log, turns = Held(run_id), []
    plain = Monitor.fold

    def noted(*batch):
        turns.append("fold")
        return plain(*batch)

    monkeypatch.setattr(Monitor, "fold", noted)

    async def renew():
        while True:
            turns.append("renew")
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(renew)
        assert not await fold_all(log, 40, turn_entries=10)
        tasks.cancel_scope.cancel()
    folds = [at for at, what in enumerate(turns) if what == "fold"]
    assert len(folds) == 14
    assert all("renew" in turns[a:b] for a, b in pairwise(folds))
