"""Entry ids that no clock makes: anyone who may append to a log may choose them."""

import json
from contextlib import suppress

import anyio
import pytest
import redis

from tests.support.errors import raises
from tests.support.event_histories import committed, registration, started
from tests.support.pipeline import announced, publish_steps, reducer_task
from tests.support.waits import PATIENCE
from trinity_events import StepReady, subscribe
from trinity_events.errors import EventsMissing, LogExhausted, PublishError
from trinity_events.log import (
    AsyncPublisher,
    MemoryEventLog,
    Publisher,
    RedisEventLog,
    Stream,
    SyncEventLog,
    list_runs,
    new_producer,
    open_run,
    position,
)
from trinity_events.log.position import LAST_ID, LATEST, is_from_a_clock
from trinity_events.log.publishing.publisher import EnvelopeFactory
from trinity_events.log.retry import is_transient
from trinity_events.reducer import reduce_all
from trinity_events.replay import current_state
from trinity_events.views.times import format_date_time, format_time
from trinity_schemas import RUN_INDEX, SaveStarted

FAR = "999999999999999-0"  # in the year 33658
READING = ("status", "explain", "tail", "replay", "runs", "verify", "export")


async def forge(log, entry_id, event=None):
    """Append an event under an id of one's own, as everyone may who may append."""
    payload = EnvelopeFactory(log.run_id, 1, new_producer("actor")).next(event or started(9))
    await log._redis.xadd(log.keys.events, {"e": payload}, id=entry_id)


@pytest.mark.parametrize("entry_id", [FAR, LAST_ID])
@pytest.mark.parametrize("command", READING)
async def test_every_command_reads_a_log_with_such_an_id(
    publisher, log, redis_url, run_id, cli, tmp_path, command, entry_id
):
    await publisher.publish(committed(9, "state_dict", registration()))
    await forge(log, entry_id)
    more = {
        "explain": ["9"],
        "export": ["--output", str(tmp_path / "run.jsonl")],
        "verify": ["--checkpoint-root", str(tmp_path)],
    }
    words = [command, *([] if command == "runs" else [run_id]), *more.get(command, ())]
    shown = cli(*words, env={"TRINITY_REDIS_URL": redis_url})
    assert shown.returncode == 0, shown.stderr
    if command == "tail":
        assert ("33658-09-27" in shown.stdout) == (entry_id == FAR)
        assert entry_id in shown.stdout


async def test_such_a_run_does_not_hide_others_nor_does_a_run_that_begins_with_one(
    client, redis_url, run_id, publisher, cli
):
    other = f"{run_id}-other"
    await open_run(client, other)
    log = RedisEventLog(client, other)
    await client.delete(log.keys.events)
    payload = EnvelopeFactory(other, 2, new_producer("trainer"))
    from trinity_schemas import RunOpened

    await client.xadd(log.keys.events, {"e": payload.next(RunOpened())}, id=FAR)
    shown = cli("runs", env={"TRINITY_REDIS_URL": redis_url})
    assert shown.returncode == 0, shown.stderr
    assert run_id in shown.stdout
    assert "33658-09-27" in shown.stdout
    rows = json.loads(cli("runs", "--json", env={"TRINITY_REDIS_URL": redis_url}).stdout)
    assert {run_id, other} <= {row["run_id"] for row in rows}


def test_times_are_shown_whatever_their_year():
    assert format_date_time(None) == "-"
    for milliseconds, year in ((0, "1970"), (LATEST, "9999"), (999999999999999, "33658")):
        assert (
            format_date_time(milliseconds)
            .rpartition(" ")[0]
            .lstrip("+")
            .startswith(
                (year, str(int(year) - 1), str(int(year) + 1))  # by the time zone
            )
        )
    assert format_date_time(2**64 - 1).startswith("58455")
    assert len(format_time(0)) == len("00:00:00.000")
    assert format_time(999999999999999).startswith("33658-")


@pytest.mark.parametrize("entry_id", [FAR, LAST_ID])
async def test_a_run_goes_on_after_such_an_id_with_those_of_the_clock(
    publisher, log, redis_url, run_id, client, entry_id
):
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [1])
        await announced(log, 1)
        await forge(log, entry_id)
        await publish_steps(publisher, [2])
        [_, second] = await announced(log, 2)
        assert second.step == 2
    state = await current_state(log)
    assert state.steps[9].kinds["state_dict"].slots, "what was appended under it counts"
    assert state.anomaly_counts == {}
    assert all(is_from_a_clock(entry.id) for entry in await log.read())
    assert await log.first_retained_id(Stream.EVENTS) is None, "nothing is taken for trimmed"


@pytest.mark.parametrize("entry_id", [FAR, LAST_ID])
async def test_a_reducer_that_comes_later_mends_it_before_anything_else(
    publisher, log, redis_url, run_id, entry_id
):
    await publish_steps(publisher, [1])
    await forge(log, entry_id)
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [2])
        assert [event.step for event in await announced(log, 2)] == [1, 2]


async def test_what_a_group_has_not_acknowledged_is_given_to_it_again(
    publisher, log, redis_url, run_id
):
    async with subscribe(
        run_id, SaveStarted, redis_url=redis_url, group="g", start="beginning", deadline=PATIENCE
    ) as events:
        await publisher.publish(started(1))
        assert (await anext(aiter(events))).event.slot.step == 1  # and it is not acknowledged
    [before] = await log.groups(Stream.EVENTS)
    await forge(log, LAST_ID)
    token, _ = await log.lead(30)
    assert await log.renumber(token, "0-0") == 1
    [after] = await log.groups(Stream.EVENTS)
    assert (after.name, after.pending) == (before.name, before.pending) == ("g", 1)
    assert after.oldest_pending == before.oldest_pending
    async with subscribe(
        run_id, SaveStarted, redis_url=redis_url, group="g", claim_after=0.02, deadline=PATIENCE
    ) as events:
        iterator = aiter(events)
        steps = set()
        while steps != {1, 9}:
            event = await anext(iterator)
            steps.add(event.event.slot.step)
            await event.ack()


async def test_a_log_that_was_trimmed_stays_trimmed(publisher, log):
    for _ in range(5):
        await publisher.publish(started(1))
    retained = (await log.read())[3:]
    await log.trim(Stream.EVENTS, retained[0].id)
    await forge(log, LAST_ID)
    token, _ = await log.lead(30)
    assert await log.renumber(token, retained[0].id) == 1
    assert (await log.read())[:3] == retained
    assert await log.first_retained_id(Stream.EVENTS) == retained[0].id


async def test_a_log_that_was_trimmed_to_nothing_goes_on_after_its_position(publisher, log):
    await publisher.publish(started(1))
    last = await log.last_id()
    await forge(log, LAST_ID)
    await log.trim(Stream.EVENTS, LAST_ID)
    token, _ = await log.lead(30)
    assert await log.renumber(token, last) == 1
    [entry] = await log.read()
    assert is_from_a_clock(entry.id)
    assert position(entry.id) > position(last)


async def test_only_the_newest_leader_renumbers_and_only_what_is_to_be(publisher, log):
    await forge(log, FAR)
    former, _ = await log.lead(0.001)
    await anyio.sleep(0.01)
    token, _ = await log.lead(30)
    assert token != former
    assert await log.renumber(former, "0-0") is None
    assert not is_from_a_clock(await log.last_id())
    assert await log.renumber(token, FAR) == 0, "it was folded under that id before"
    assert await log.renumber(token, "0-0") == 1
    before = await log.read()
    assert await log.renumber(token, "0-0") == 0
    assert await log.read() == before


async def test_the_twin_has_none_to_renumber(run_id):
    log = MemoryEventLog(run_id)
    await log.append(b"x")
    token, _ = await log.lead(30)
    assert await log.renumber(token, "0-0") == 0
    assert await log.renumber(token + 1, "0-0") is None


async def test_nothing_follows_the_last_id(log, client):
    await client.xadd(log.keys.events, {"e": "x"}, id=LAST_ID)
    assert await log.read(LAST_ID) == []
    assert await log.read_blocking({Stream.EVENTS: LAST_ID}, seconds=0.01) == []
    assert await MemoryEventLog("run").read(LAST_ID) == []


async def test_publishers_wait_while_a_log_takes_nothing_and_say_so(
    publisher, log, sync_client, redis_url, run_id
):
    await forge(log, LAST_ID)
    with raises(LogExhausted, where=f"the log of run {run_id}", repaired_by="reducer") as caught:
        await log.append(b"x")
    assert is_transient(caught.value)
    impatient = AsyncPublisher(log, 1, new_producer("trainer"), deadline=0.1)
    with raises(PublishError, deadline=0.1, reason=str(caught.value)):
        await impatient.publish(started(1))
    waiting = Publisher(SyncEventLog(sync_client, run_id), 1, new_producer("actor"))
    waiting.publish(started(10))
    with raises(EventsMissing, count=1, reason=str(caught.value)):
        await anyio.to_thread.run_sync(waiting.flush, 0.5)
    async with reducer_task(redis_url, run_id):
        await anyio.to_thread.run_sync(waiting.flush, 30)
    waiting.close()


async def test_an_epoch_that_cannot_be_opened_is_not_taken(publisher, log, client):
    await forge(log, LAST_ID)
    before = await client.get(log.keys.epoch)
    with pytest.raises(LogExhausted):
        await log.open_epoch(lambda _: b"x")
    assert await client.get(log.keys.epoch) == before


async def test_the_index_of_runs_goes_on_too(redis_url, client, run_id, publisher, log):
    there = list(await list_runs(client))
    with suppress(redis.ResponseError):
        await client.xadd(RUN_INDEX, {"run": run_id}, id=LAST_ID)
    other = f"{run_id}-other"
    async with anyio.create_task_group() as tasks:

        async def serve():
            await reduce_all(redis_url, run_id=None, root=None)

        tasks.start_soon(serve)
        epoch = await open_run(client, other, deadline=60)
        trainer = AsyncPublisher(RedisEventLog(client, other), epoch, new_producer("trainer"))
        await publish_steps(trainer, [1])
        await announced(RedisEventLog(client, other), 1)
        tasks.cancel_scope.cancel()
    assert set(await list_runs(client)) == {*there, other}
    index = await client.xrange(RUN_INDEX)
    assert all(is_from_a_clock(entry_id.decode()) for entry_id, _ in index)


async def test_a_run_is_silent_although_its_last_entry_is_of_the_future(
    client, publisher, log, redis_url
):
    from trinity_events.liveness import abandoned_since

    assert await abandoned_since(client, await current_state(log)) is None, "just now"
    await forge(log, FAR)
    assert await abandoned_since(client, await current_state(log)) == 999999999999999


async def test_subscribers_hear_of_steps_before_and_after(publisher, log, redis_url, run_id):
    async with (
        reducer_task(redis_url, run_id),
        subscribe(run_id, StepReady, redis_url=redis_url, deadline=PATIENCE) as events,
    ):
        iterator = aiter(events)
        await publish_steps(publisher, [1])
        assert (await anext(iterator)).step == 1
        await forge(log, LAST_ID)
        await publish_steps(publisher, [2])
        assert (await anext(iterator)).step == 2
