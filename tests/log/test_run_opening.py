"""Opening runs, the index and what cannot be written; the log itself is in test_log_contract."""

import anyio
import pytest
import redis.asyncio

from tests.support.errors import raises
from tests.support.event_histories import committed, registration
from tests.support.waits import PATIENCE
from trinity_events.errors import KeyConflict, PublishError, RunNotFound
from trinity_events.log import (
    ORIGIN,
    AsyncPublisher,
    Commit,
    DeadLetter,
    Entry,
    RedisEventLog,
    Stream,
    before,
    list_runs,
    new_producer,
    open_run,
    position,
    require_run,
    watch_runs,
)
from trinity_events.log.position import MalformedEntryId
from trinity_schemas import RunOpened, RunResumed, StepRef, decode_envelope, grant_key


async def test_each_opening_of_a_run_takes_the_next_epoch(client, run_id):
    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(open_run, client, run_id)
    assert await open_run(client, run_id, resume_from=7) == 11
    assert await open_run(client, run_id, resume_from=StepRef(11, 8)) == 12
    envelopes = [decode_envelope(e.payload) for e in await RedisEventLog(client, run_id).read()]
    assert [envelope.epoch for envelope in envelopes] == list(range(1, 13))
    assert envelopes[0].event == RunOpened()
    assert envelopes[-2].event == RunResumed(step=7)
    assert envelopes[-1].event == RunResumed(step=8, checkpoint=StepRef(11, 8))


async def test_what_cannot_be_published_is_an_error_that_names_the_event(run_id):
    client = redis.asyncio.Redis(port=1, retry=None)
    log = RedisEventLog(client, run_id)
    publisher = AsyncPublisher(log, 1, new_producer("trainer"), deadline=0.5)
    with raises(
        PublishError, run_id=run_id, what=f"step-committed of run {run_id} was not published"
    ):
        await publisher.publish(committed(1, "state_dict", registration()))
    await client.aclose()


async def test_runs_are_listed_once_and_found_by_name(client, run_id):
    await open_run(client, run_id)
    await open_run(client, run_id)
    assert list(await list_runs(client)).count(run_id) == 1
    assert await require_run(client, run_id) == run_id
    assert await require_run(client, None) == run_id
    with raises(RunNotFound, run_id="missing", fault="absent"):
        await require_run(client, "missing")


async def test_new_runs_are_waited_for_not_polled_for(client, run_id):
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            runs = []

            async def watch():
                async for run in watch_runs(client):
                    runs.append(run)
                    if run == run_id:
                        tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            await anyio.sleep(0.05)
            await client.xadd("trinity:runs", {"something": "else"})
            await open_run(client, run_id)
    assert runs[-1] == run_id


def test_positions_order_by_number_not_by_text():
    assert position("10-2") > position("9-11")
    assert before("10-2") == "10-1"
    assert position(before("10-0")) < position("10-0")
    with raises(MalformedEntryId, entry_id="ten"):
        position("ten")


async def test_a_group_that_others_created_is_not_idle_since_its_stream_began(client, log, run_id):
    await open_run(client, run_id)
    await client.xgroup_create(log.keys.events, b"theirs-\xff", id="0")
    for _ in range(2):
        [group] = await log.groups(Stream.EVENTS)
        assert group.idle < 30
        assert (group.printable_name, group.members) == ("theirs-\\xff", 0)


@pytest.mark.parametrize("key_name", ["position", "announcements", "dead", "current", "grant"])
async def test_a_commit_that_meets_a_key_of_something_else_writes_nothing(client, run_id, key_name):
    log = RedisEventLog(client, run_id)
    token, _ = await log.lead(60)
    key = grant_key(run_id, "save") if key_name == "grant" else getattr(log.keys, key_name)
    await client.lpush(key, "of something else")
    step = Commit(
        token=token,
        after=ORIGIN,
        position="1-0",
        announcements=[("step-ready/weights", b"said")],
        grants=["save"],
        dead_letters=[DeadLetter(Entry("1-0", b""), "why")],
        snapshot=b"state",
    )
    before_it = {key: await client.dump(key) for key in await _keys_of(client, run_id)}
    with raises(KeyConflict, key=key, fault="type", actual="list"):
        await log.commit(step)
    assert {key: await client.dump(key) for key in await _keys_of(client, run_id)} == before_it
    await client.delete(key)
    assert await log.commit(step)


async def _keys_of(client, run_id):
    return sorted(await client.keys(f"trinity:{{{run_id}}}:*"))
