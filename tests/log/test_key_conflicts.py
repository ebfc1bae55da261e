"""What something else wrote under a run's own keys: one sentence that names the key."""

import re
from functools import partial

import anyio
import pytest

from tests.support.errors import assert_attributes, raises
from tests.support.event_histories import committed, started
from tests.support.pipeline import publish_steps, recorded, reducer_task, until
from tests.support.waits import PATIENCE
from trinity_events import StepReady, subscribe
from trinity_events.archive import import_recording, record_run
from trinity_events.errors import EventsMissing, KeyConflict, PublishError
from trinity_events.log import Publisher, Stream, SyncEventLog, new_producer, open_run
from trinity_events.reducer import Policy, ReducerTimeouts, reduce_all
from trinity_events.replay import current_state
from trinity_events.server import EmbeddedServer, connect
from trinity_schemas import RUN_INDEX, RunKeys

pytestmark = pytest.mark.server

BYTES = b"\xff of something else"


def naming(key):
    return raises(KeyConflict, key=key)


async def test_leases_that_a_reader_invents_end_and_stop_no_deletion(log, client):
    token, _ = await log.lead(60)
    await client.zadd(log.keys.holds, {"no step": "inf", BYTES: "inf", "1 reader": "inf"})
    assert await log.mark_deleting(token, [1, 2]) == {2}
    leases = await client.zrange(log.keys.holds, 0, -1, withscores=True)
    now = await log.now()
    assert leases and all(now < end <= now + 600_000 for _, end in leases)


WRONG_TYPES = {
    "appending": ("events", lambda log: log.append(b"")),
    "reading": ("events", lambda log: log.read()),
    "waiting": (
        "announcements",
        lambda log: log.read_blocking({Stream.ANNOUNCEMENTS: "0-0"}, seconds=1),
    ),
    "looking at the end": ("events", lambda log: log.last_id()),
    "looking at the beginning": ("events", lambda log: log.first_retained_id(Stream.EVENTS)),
    "looking at groups": ("announcements", lambda log: log.groups(Stream.ANNOUNCEMENTS)),
    "making a group": ("events", lambda log: log.create_group(Stream.EVENTS, "eval", "0-0")),
    "opening an epoch": ("epoch", lambda log: log.open_epoch(lambda _: b"")),
    "leading": ("fence", lambda log: log.lead(60)),
    "appending as the leader": ("fence", lambda log: log.append_leading(1, b"")),
    "loading": ("position", lambda log: log.load()),
    "looking at what stands": ("current", lambda log: log.current_announcements()),
    "looking at dead letters": ("dead", lambda log: log.dead_letters()),
    "holding a checkpoint": ("holds", lambda log: log.acquire_lease(1, "me", 60)),
}


POLICY = Policy(timeouts=ReducerTimeouts(fault_retry=0.1))


@pytest.mark.parametrize(("field", "deed"), WRONG_TYPES.values(), ids=WRONG_TYPES)
async def test_a_key_of_another_type_is_named(log, client, field, deed):
    key = getattr(log.keys, field)
    await client.sadd(key, BYTES)
    with naming(key):
        await deed(log)
    await client.delete(key)
    if field != "announcements":
        await deed(log)


WRONG_BYTES = {
    "epoch": lambda client, key: client.set(key, BYTES),
    "fence": lambda client, key: client.set(key, BYTES),
    "position": lambda client, key: client.set(key, BYTES),
    "position that is text": lambda client, key: client.set(key, "here"),
    "current": lambda client, key: client.hset(key, BYTES, b"1-0 x"),
    "current without an id": lambda client, key: client.hset(key, "step-ready/weights", BYTES),
    "dead": lambda client, key: client.xadd(key, {"something": BYTES}),
    "dead of no entry": lambda client, key: client.xadd(
        key, {"id": "nowhere", "reason": "none", "e": BYTES}
    ),
}
ASKED = {
    "epoch": lambda log: log.open_epoch(lambda _: b""),
    "fence": lambda log: log.lead(60),
    "position": lambda log: log.load(),
    "current": lambda log: log.current_announcements(),
    "dead": lambda log: log.dead_letters(),
}


@pytest.mark.parametrize("what", WRONG_BYTES)
async def test_bytes_of_something_else_are_named_by_their_key(log, client, what):
    field = what.split()[0]
    key = getattr(log.keys, field)
    await WRONG_BYTES[what](client, key)
    with naming(key):
        await ASKED[field](log)


async def test_commands_and_subscriptions_name_the_key(
    publisher, log, client, redis_url, run_id, cli, tmp_path
):
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [1])
        await until(log.current_announcements)
    keys = log.keys
    await client.hset(keys.current, BYTES, BYTES)
    with naming(keys.current):
        async with subscribe(run_id, StepReady, redis_url=redis_url, deadline=PATIENCE) as events:
            await anext(events)
    await client.xadd(keys.dead, {"something": BYTES})
    with naming(keys.dead):
        await record_run(log, tmp_path / "run.jsonl")
    await client.set(keys.position, BYTES)
    with naming(keys.position):
        await current_state(log)
    for command in ("export", "status", "verify"):
        result = cli(command, run_id, "--redis-url", redis_url)
        assert result.returncode == 1
        [line] = result.stderr.splitlines()
        assert line.startswith(f"error: {keys.position} holds ")


async def test_an_index_of_runs_that_something_else_wrote_is_named(run_id, cli, tmp_path, caplog):
    with EmbeddedServer(tmp_path).attached() as url:
        async with connect(url) as client, anyio.create_task_group() as tasks:
            await client.set(RUN_INDEX, BYTES)
            for command in (["runs"], ["tail", run_id]):
                result = cli(*command, "--redis-url", url)
                assert result.returncode == 1
                [line] = result.stderr.splitlines()
                assert line.startswith(
                    f"error: {RUN_INDEX} is a string, where the log keeps a stream: something else"
                )
            with naming(RUN_INDEX):
                await open_run(client, run_id)
            tasks.start_soon(partial(reduce_all, url, run_id=None, root=None, policy=POLICY))
            await until(lambda: f"cannot be read: {RUN_INDEX} is a string" in caplog.text)
            await client.delete(RUN_INDEX)
            await open_run(client, run_id)
            await until(lambda: client.exists(RunKeys.of(run_id).leader))
            tasks.cancel_scope.cancel()


async def test_who_publishes_is_told_which_key_it_is(client, sync_client, publisher, log, run_id):
    await client.delete(log.keys.events)
    await client.set(log.keys.events, BYTES)
    with raises(PublishError, run_id=run_id) as caught:
        await publisher.publish(started(1))
    conflict = {"key": log.keys.events, "actual": "string", "expected": "stream"}
    assert_attributes(caught.value.__cause__, **conflict)
    with raises(KeyConflict, **conflict):
        await open_run(client, run_id)
    rank = Publisher(SyncEventLog(sync_client, run_id), 1, new_producer("actor"))
    rank.publish(started(1))
    with raises(EventsMissing, reason=re.compile(re.escape(log.keys.events))):
        rank.flush(10)
    await client.delete(log.keys.events)
    rank.close()
    await publisher.publish(started(1))
    assert len(await log.read()) == 2, "nothing was lost, and nothing is twice"


async def test_a_reducer_waits_until_the_key_is_mended(
    publisher, log, client, redis_url, run_id, caplog
):
    await client.set(log.keys.fence, BYTES)
    async with reducer_task(redis_url, run_id, policy=POLICY):
        await publish_steps(publisher, [1])
        await until(lambda: f"cannot be folded: {log.keys.fence} holds b'" in caplog.text)
        await client.set(log.keys.fence, 7)
        await until(log.current_announcements)


async def test_an_event_among_the_announcements_ends_no_import(
    publisher, log, client, redis_url, run_id, tmp_path
):
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [1])
        standing = await until(log.current_announcements)
    [event, *_] = await log.read()
    await client.xadd(log.keys.announcements, {"e": event.payload})
    await client.xadd(log.keys.announcements, {"something": BYTES})
    recording = await recorded(log)
    with EmbeddedServer(tmp_path).attached() as other:
        async with connect(other) as elsewhere:
            await import_recording(elsewhere, recording)
            imported = type(log)(elsewhere, run_id)
            assert await imported.current_announcements() == standing
            assert await imported.read(stream=Stream.ANNOUNCEMENTS) == recording.announcements


async def test_an_import_leaves_keys_of_something_else_alone(publisher, log, run_id, tmp_path):
    await publisher.publish(committed(1, "state_dict"))
    recording = await recorded(log)
    with EmbeddedServer(tmp_path).attached() as other:
        async with connect(other) as elsewhere:
            await elsewhere.set(log.keys.dead, BYTES)
            with naming(log.keys.dead):
                await import_recording(elsewhere, recording)
            assert await elsewhere.get(log.keys.dead) == BYTES
            await elsewhere.delete(log.keys.dead)
            await import_recording(elsewhere, recording)
