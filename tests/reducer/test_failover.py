"""Reducers that die, stop and wake up, and servers that have less than they had."""

import signal
import time
from contextlib import closing

import anyio
import anyio.to_thread
import pytest

from tests.support.event_histories import committed, finished, registration
from tests.support.faulty_proxy import Proxy
from tests.support.pipeline import (
    announced,
    publish_steps,
    reducer_process,
    reducer_task,
    trimming,
    until,
)
from tests.support.redis_servers import servers
from tests.support.waits import PATIENCE
from trinity_events.archive import Archive
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
from trinity_schemas import RunKeys, StepReady, TrainerStatusChanged, decode_envelope

pytestmark = pytest.mark.server


async def save_steps(publisher, steps):
    for step in steps:
        await publisher.publish(committed(step, "state_dict", registration()))
        await publisher.publish(finished(step, f"save-{step}"))


@pytest.mark.processes
async def test_another_leads_within_seconds_when_the_leader_is_killed(
    publisher, log, redis_url, run_id, tmp_path
):
    """Invariant 2 of leader.py."""
    with reducer_process(redis_url, run_id, tmp_path) as leader:
        await save_steps(publisher, [1])
        await announced(log, 1)
        with reducer_process(redis_url, run_id, tmp_path):
            leader.send_signal(signal.SIGKILL)
            await save_steps(publisher, [2])
            assert [event.step for event in await announced(log, 2)] == [1, 2]


async def test_after_a_planned_failover_all_go_on_with_the_new_server(tmp_path, run_id):
    with servers(tmp_path, 2) as [first, second], Proxy(first.url) as address:
        with second.client() as client:
            client.replicaof("127.0.0.1", first.port)
        async with connect(address.url) as client:
            epoch, log = await open_run(client, run_id), RedisEventLog(client, run_id)
            confirmed = AsyncPublisher(log, epoch, new_producer("trainer"), deadline=PATIENCE)
            sync_log = SyncEventLog(open_client(address.url), run_id)
            with closing(Publisher(sync_log, epoch, new_producer("worker"))) as buffered:
                async with reducer_task(address.url, run_id, None):
                    await save_steps(confirmed, [1])
                    buffered.publish(TrainerStatusChanged(status="running"))
                    await anyio.to_thread.run_sync(buffered.flush, 20)
                    await announced(log, 1)
                    fence = await client.get(log.keys.fence)
                    hand_over(first, second)
                    address.lead_to(second.url)  # the old one lives on, with its connections
                    await save_steps(confirmed, [2])
                    buffered.publish(TrainerStatusChanged(status="stopped"))
                    await anyio.to_thread.run_sync(buffered.flush, 20)
                    assert [event.step for event in await announced(log, 2)] == [1, 2]
            with second.client() as new:
                assert int(new.get(log.keys.fence)) <= int(fence) + 1


def hand_over(first, second):
    """The second server has all that the first has, and leads from now on; the first follows."""
    with first.client() as old, second.client() as new:
        info = "master_repl_offset"
        for _ in range(1000):
            there, here = old.info("replication")[info], new.info("replication")
            if here.get("master_link_status") == "up" and here["slave_repl_offset"] >= there:
                break
            time.sleep(0.01)
        new.replicaof("NO", "ONE")
        old.replicaof("127.0.0.1", second.port)


@pytest.mark.processes
async def test_a_leader_that_slept_through_a_take_over_writes_nothing_when_it_wakes(
    publisher, log, redis_url, run_id, tmp_path
):
    """Invariant 1 of leader.py."""
    stderr_file = tmp_path / "stderr.txt"
    pointer = tmp_path / run_id / "latest_state_dict_iteration.txt"
    for step in (1, 2, 3):
        (tmp_path / run_id / f"global_step_{step}").mkdir(parents=True)
        (tmp_path / run_id / f"global_step_{step}" / "model.pt").touch()
    with (
        stderr_file.open("wb") as stderr,
        reducer_process(redis_url, run_id, tmp_path, stderr=stderr) as old,
    ):
        await save_steps(publisher, [1])
        await announced(log, 1)
        await until(lambda: pointer.exists() and pointer.read_text() == "1")
        old.send_signal(signal.SIGSTOP)
        # Sent while it sleeps: it finds them when it wakes, and folds them as its successor did.
        await save_steps(publisher, [2, 3])
        with reducer_process(redis_url, run_id, tmp_path):
            await announced(log, 3)
            before = await _all_keys(log)
            old.send_signal(signal.SIGCONT)
            await until(lambda: "lost the lead" in stderr_file.read_text())
            after = await _all_keys(log)
            assert after == before
            ready = [event for event in await announced(log, 3) if isinstance(event, StepReady)]
            assert [event.step for event in ready] == [1, 2, 3]
            # What a leader that was overtaken may still have written is put right.
            pointer.write_text("1")
            await until(lambda: pointer.read_text() == "3")


async def _all_keys(log):
    """What a reducer may write on the server, but for the lead itself."""
    keys = log.keys
    return [
        await log.read(),
        await log.read(stream=Stream.ANNOUNCEMENTS),
        await log.current_announcements(),
        await log.load(),
        await log._redis.get(keys.fence),
        await log.dead_letters(),
    ]


async def copied(redis, run_id):
    """What the server has of a run, as a replica has it that was told no more."""
    dumps = {}
    for field, key in RunKeys.of(run_id)._asdict().items():
        if field not in ("leader", "fence"):
            dumps[key] = await redis.dump(key)
    return dumps


async def put_back(redis, dumps):
    async with redis.pipeline(transaction=True) as pipe:
        for key, dumped in dumps.items():
            pipe.delete(key)
            if dumped is not None:
                pipe.restore(key, 0, dumped)
        await pipe.execute()


async def test_what_a_failover_lost_is_reported_and_the_run_goes_on(
    publisher, log, redis_url, run_id, caplog
):
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [1])
        await announced(log, 1)
        await until(lambda: _is_folded(log))
        dumps = await copied(log._redis, run_id)
        await publish_steps(publisher, [2])
        await announced(log, 2)
        await until(lambda: _is_folded(log))
        await put_back(log._redis, dumps)
        await until(lambda: "failed over or lost its data" in caplog.text)
        await publish_steps(publisher, [3])
        assert [event.step for event in await announced(log, 2)] == [1, 3]
    assert (await current_state(log)).anomaly_counts == {"gap": 1}


async def _is_folded(log):
    return (await log.load())[1] == await log.last_id()


async def test_a_position_beyond_the_end_of_the_log_is_reported_and_the_run_goes_on(
    publisher, log, redis_url, run_id, caplog
):
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [1])
        await announced(log, 1)
    await log._redis.set(log.keys.position, "99999999999999-0")
    async with reducer_task(redis_url, run_id):
        await until(lambda: "has no entry 99999999999999-0" in caplog.text)
        await publish_steps(publisher, [2])
        assert [event.step for event in await announced(log, 2)] == [1, 2]
        await until(lambda: _is_folded(log))
    assert "the server failed over or lost its data" in caplog.text


@pytest.fixture
async def trimmed(publisher, log, redis_url, run_id, tmp_path):
    """A run whose first entries are in the archive alone."""
    async with reducer_task(redis_url, run_id, tmp_path, trimming(9)):
        for step in range(1, 20):
            await publish_steps(publisher, [step])
            await announced(log, step)
            await until(lambda: _is_folded(log))
            if await log.first_retained_id(Stream.EVENTS) is not None:
                break
    assert await log.first_retained_id(Stream.EVENTS) is not None
    return step


async def test_without_a_readable_snapshot_a_trimmed_log_is_folded_from_its_archive(
    trimmed, publisher, log, redis_url, run_id, tmp_path, caplog
):
    before = await current_state(log)
    await log._redis.set(log.keys.snapshot, b"\x01")
    async with reducer_task(redis_url, run_id, tmp_path):
        await publish_steps(publisher, [trimmed + 1])
        await until(lambda: _is_folded(log))
    assert "is not readable" in caplog.text
    archived = Archive(tmp_path / run_id, run_id)
    replay = Replay(run_id)
    replay.feed(archived.read(Stream.EVENTS))
    async for entry in read_all(log, after=replay.state.position):
        replay.feed([entry])
    # Its publication was started, it is ready, and an older one is retired.
    assert replay.state.announced == before.announced + 3
    announcements = [entry async for entry in read_all(log, Stream.ANNOUNCEMENTS)]
    last = decode_envelope(announcements[-1].payload)
    assert last.sequence == replay.state.announced, "numbered as if nothing had happened"


async def test_an_archive_that_lacks_a_part_is_one_sentence(
    trimmed, publisher, log, redis_url, run_id, tmp_path, caplog
):
    await log._redis.delete(log.keys.snapshot)
    missing = min((tmp_path / run_id / "log").glob("events.*"))
    missing.unlink()
    async with reducer_task(redis_url, run_id, tmp_path):
        await until(lambda: "a segment was moved or deleted" in caplog.text)
    [sentence] = [record for record in caplog.records if "cannot be folded" in record.message]
    assert sentence.exc_info is None
    for path in (tmp_path / run_id / "log").glob("events.*"):
        path.unlink()
    caplog.clear()
    await log._redis.set(log.keys.snapshot, b"\x01")
    async with reducer_task(redis_url, run_id, tmp_path):
        await until(lambda: "its archive ends at 0-0" in caplog.text)
