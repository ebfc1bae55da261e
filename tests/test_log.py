"""The event log, its publishers and the index, against a real server."""

import threading

import anyio
import pytest
import redis.asyncio

from tests.histories import committed, registration
from trinity_events.errors import PublishError, RunNotFound
from trinity_events.log import (
    ORIGIN,
    AsyncPublisher,
    Commit,
    DeadLetter,
    Entry,
    Publisher,
    RedisEventLog,
    Stream,
    SyncEventLog,
    before,
    list_runs,
    new_producer,
    open_run,
    position,
    require_run,
    watch_runs,
)
from trinity_events.server import open_client
from trinity_schemas import ContractError, RunOpened, RunResumed, decode_envelope


async def test_entries_are_read_in_order_and_after_a_position(log):
    ids = [await log.append(bytes([number])) for number in range(5)]
    assert [entry.payload for entry in await log.read()] == [bytes([n]) for n in range(5)]
    assert [entry.id for entry in await log.read(ids[1], limit=2)] == ids[2:4]
    assert [entry.id for entry in await log.read(ids[1], through=ids[3])] == ids[2:4]
    assert await log.last_id() == ids[-1]


async def test_a_wait_returns_what_is_appended_meanwhile(log):
    found = []

    async def wait():
        found.extend(await log.wait({Stream.EVENTS: ORIGIN}, seconds=5))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.sleep(0.05)
        assert found == []
        entry_id = await log.append(b"now")
    assert found == [(Stream.EVENTS, Entry(entry_id, b"now"))]


async def test_a_wait_for_nothing_returns_empty(log):
    assert await log.wait({Stream.EVENTS: ORIGIN}, seconds=0.05) == []


async def test_each_opening_of_a_run_takes_the_next_epoch(client, run_id):
    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(open_run, client, run_id)
    assert await open_run(client, run_id, resume_from=7) == 11
    envelopes = [decode_envelope(e.payload) for e in await RedisEventLog(client, run_id).read()]
    assert [one.epoch for one in envelopes] == list(range(1, 12))
    assert envelopes[0].event == RunOpened()
    assert envelopes[-1].event == RunResumed(step=7)


async def test_publishers_number_their_events_in_the_order_of_the_log(log, redis_url, run_id):
    publisher = Publisher(SyncEventLog(open_client(redis_url), run_id), 1, new_producer("actor"))

    def publish():
        for _ in range(50):
            publisher.publish(committed(1))

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await anyio.to_thread.run_sync(thread.join)
    publisher.log.close()
    sequences = [decode_envelope(entry.payload).sequence for entry in await log.read()]
    assert sequences == list(range(1, 201))


async def test_what_cannot_be_published_is_an_error_that_names_the_event(run_id):
    client = redis.asyncio.Redis(port=1, retry=None)
    publisher = AsyncPublisher(RedisEventLog(client, run_id), 1, new_producer("trainer"))
    with pytest.raises(PublishError, match=f"step-committed of run {run_id} was not published"):
        await publisher.publish(committed(1, "state_dict", registration()))
    await client.aclose()


async def test_an_event_that_breaks_the_contract_is_refused_by_its_sender(log):
    publisher = AsyncPublisher(log, 1, new_producer("no slug"))
    with pytest.raises(ContractError, match=r"role"):
        await publisher.publish(committed(1))
    assert await log.read() == []


async def test_a_commit_counts_only_for_the_newest_leader_and_from_its_own_position(log):
    token, _ = await log.lead(0.05)
    await anyio.sleep(0.1)
    newer, _ = await log.lead(5)
    assert newer == token + 1
    assert await log.lead(5) == (0, pytest.approx(5, abs=0.5))
    announce = [("step-ready/weights", b"announced")]
    stale = Commit(token=token, after=ORIGIN, position="1-0", announcements=announce)
    assert not await log.commit(stale)
    fresh = Commit(token=newer, after=ORIGIN, position="1-0", announcements=announce, snapshot=b"s")
    assert await log.commit(fresh)
    assert not await log.commit(fresh), "the same step, sent again"
    assert [e.payload for e in await log.read(stream=Stream.ANNOUNCEMENTS)] == [b"announced"]
    assert await log.load() == (b"s", "1-0")
    [standing] = await log.standing()
    assert (standing.subject, standing.entry.payload) == announce[0]


async def test_dead_letters_are_kept_with_their_reason(log, client):
    token, _ = await log.lead(5)
    letter = DeadLetter(Entry("9-0", b"\xff"), "not MessagePack")
    assert await log.commit(
        Commit(token=token, after=ORIGIN, position="9-0", dead_letters=[letter])
    )
    [(_, fields)] = await client.xrange(log.keys.dead)
    assert fields == {b"id": b"9-0", b"reason": b"not MessagePack", b"e": b"\xff"}


async def test_a_lease_that_is_not_renewed_is_free(log):
    token, _ = await log.lead(0.1)
    assert await log.renew(token, 0.1)
    await anyio.sleep(0.15)
    assert not await log.renew(token, 0.1)


async def test_runs_are_listed_once_and_found_by_name(client, run_id):
    await open_run(client, run_id)
    await open_run(client, run_id)
    assert list(await list_runs(client)).count(run_id) == 1
    assert await require_run(client, run_id) == run_id
    assert await require_run(client, None) == run_id
    with pytest.raises(RunNotFound, match="there is no run 'missing'"):
        await require_run(client, "missing")


async def test_new_runs_are_waited_for_not_polled_for(client, run_id):
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            found = []

            async def watch():
                async for one in watch_runs(client):
                    found.append(one)
                    if one == run_id:
                        tasks.cancel_scope.cancel()

            tasks.start_soon(watch)
            await anyio.sleep(0.05)
            await client.xadd("trinity:runs", {"something": "else"})
            await open_run(client, run_id)
    assert found[-1] == run_id


def test_positions_order_by_number_not_by_text():
    assert position("10-2") > position("9-11")
    assert before("10-2") == "10-1"
    assert position(before("10-0")) < position("10-0")
    with pytest.raises(ValueError, match="is not an entry id"):
        position("ten")
