"""Reports of explorers on their way into the events, on a real server and on the log in memory.

The numbers are those of the invariants in `trinity_events/reducer/report_intake.py`.
"""

import anyio
import pytest

from tests.support.event_histories import committed, started
from tests.support.faulty_proxy import Proxy, script
from tests.support.pipeline import folded, recorded, reducer_task, reports_accepted, until
from trinity_events.archive.verify import verify
from trinity_events.log import (
    ORIGIN,
    AsyncPublisher,
    DeadLetter,
    Entry,
    Intake,
    MemoryEventLog,
    RedisEventLog,
    new_producer,
    position,
)
from trinity_events.log.position import LAST_ID
from trinity_events.log.publishing.publisher import EnvelopeFactory
from trinity_events.reducer import reduce_run
from trinity_events.replay import current_state
from trinity_events.server import connect
from trinity_events.testing import Pipeline
from trinity_schemas import (
    ExplorerStatusChanged,
    RunClosed,
    SyncRequested,
    decode_envelope,
    encode,
)

PLACES = ("before", "within", "after")
FAR = "999999999999999-0"  # in the year 33658
RUNNING, STOPPED = (ExplorerStatusChanged(status=status) for status in ("running", "stopped"))


@pytest.fixture(params=["memory", "redis"])
async def either_log(request, run_id):
    if request.param == "memory":
        yield MemoryEventLog(run_id)
    else:
        async with connect(request.getfixturevalue("redis_url")) as client:
            yield RedisEventLog(client, run_id)


def explorer(log, rank=0):
    return AsyncPublisher(log, 1, new_producer("explorer", rank))


@pytest.fixture
def proxy(redis_url):
    with Proxy(redis_url) as between:
        yield between


async def payloads(log):
    return [entry.payload for entry in await log.read(limit=100_000)]


# --- the port --------------------------------------------------------------------------------


@pytest.mark.server
async def test_reports_are_accepted_once_and_by_the_newest_leader_alone(either_log):
    """1"""
    log = either_log
    ids = [await log.append_report(bytes([number])) for number in range(4)]
    assert await payloads(log) == [], "a report is no event yet"
    assert await log.has_reports()
    token, _ = await log.lead(60)
    reports = await log.read_reports(ORIGIN, seconds=1, limit=3)
    assert [entry.id for entry in reports] == ids[:3]
    intake = Intake(
        token=token,
        after=ORIGIN,
        position=ids[2],
        accepted=[reports[0].payload, reports[2].payload],
        refused=[DeadLetter(reports[1], "no report")],
    )
    assert not await log.accept_reports(
        Intake(token=token - 1, after=ORIGIN, position=ids[2], accepted=[b"of a former leader"])
    )
    assert await log.accept_reports(intake)
    assert not await log.accept_reports(intake), "after a lost reply it is not done again"
    assert await payloads(log) == [bytes([0]), bytes([2])]
    assert await log.dead_letters() == [DeadLetter(Entry(ids[1], bytes([1])), "no report")]
    assert await log.reports_position() == ids[2]
    assert await log.has_reports()
    assert [entry.id for entry in await log.read_reports(ids[2], seconds=1, limit=9)] == ids[3:]
    last = Intake(token=token, after=ids[2], position=ids[3])
    assert await log.accept_reports(last)
    assert not await log.has_reports()


@pytest.mark.parametrize("entry_id", [FAR, LAST_ID])
async def test_dead_letters_with_an_id_of_a_writer_stop_no_report_and_repeat_none(
    log, redis_url, entry_id
):
    fields = {"id": "1-1", "reason": "invented", "e": b""}
    await log._redis.xadd(log.keys.dead, fields, id=entry_id)
    report = EnvelopeFactory(log.run_id, 1, new_producer("explorer")).next(RUNNING)
    await log.append_report(report)
    await log.append_report(b"no report")
    async with reducer_task(redis_url, log.run_id):
        await reports_accepted(log)
    assert await payloads(log) == [report]
    reasons = [letter.reason for letter in await log.dead_letters()]
    assert reasons[0] == "invented" and len(reasons) == 2
    newest = await log._redis.xrevrange(log.keys.dead, count=1)
    assert position(newest[0][0].decode()) < position(FAR)


async def test_reports_that_were_moved_take_no_memory(log, redis_url):
    async with reducer_task(redis_url, log.run_id):
        for number in range(50):
            await log.append_report(bytes([number]))
        await reports_accepted(log)
    assert await log._redis.xlen(log.keys.reports) <= 1


# --- the intake ------------------------------------------------------------------------------


async def test_reports_of_each_explorer_keep_their_order_and_bytes(log, publisher, redis_url):
    """2"""
    await publisher.publish(committed(1))
    explorers = [explorer(log, rank) for rank in range(3)]
    async with reducer_task(redis_url, log.run_id):
        for _ in range(20):
            for each in explorers:
                await each.publish(RUNNING)
        await reports_accepted(log)
    envelopes = [decode_envelope(payload) for payload in await payloads(log)]
    for rank in range(3):
        reported = [each for each in envelopes if each.producer.role == "explorer"]
        sequences = [each.sequence for each in reported if each.producer.rank == rank]
        assert sequences == list(range(1, 21))
    assert (await current_state(log)).anomaly_counts == {}


async def test_a_report_that_is_refused_is_a_dead_letter_and_delays_no_other(
    log, publisher, redis_url, caplog
):
    """3"""
    forged = EnvelopeFactory(log.run_id, 1, new_producer("actor")).next(started(90_001))
    await log.append_report(forged)
    await log.append_report(b"\xff")
    await explorer(log).publish(RUNNING)
    async with reducer_task(redis_url, log.run_id):
        await folded(log)
    state = await current_state(log)
    assert state.explorers["explorer-0"].status == "running"
    assert 90_001 not in state.steps
    first, second = await log.dead_letters()
    assert "save-started is not an event that explorers report" in first.reason
    assert second.reason.startswith("a report was refused: not an event envelope")
    assert "2 reports were refused" in caplog.text


async def test_no_report_uses_up_the_sequence_of_the_trainer(log, publisher, redis_url):
    """The fold would take the trainer's next events for duplicates."""
    await publisher.publish(committed(1, "weights"))
    [*_, last] = [decode_envelope(payload) for payload in await payloads(log)]
    forged = EnvelopeFactory(log.run_id, 1, new_producer("explorer"))
    envelope = decode_envelope(forged.next(RUNNING))
    stolen = type(envelope)(
        **{
            name: getattr(envelope, name)
            for name in envelope.__struct_fields__
            if name not in ("producer", "sequence")
        },
        producer=type(last.producer)(
            role="explorer", rank=0, node="evil", incarnation=last.producer.incarnation
        ),
        sequence=2**53,
    )
    await log.append_report(encode(stolen))
    async with reducer_task(redis_url, log.run_id):
        await folded(log)
        await publisher.publish(committed(2, "weights"))
        await folded(log)
    assert (await current_state(log)).anomaly_counts == {}


@pytest.mark.parametrize("entry_id", [FAR, LAST_ID])
async def test_an_id_that_no_clock_made_stops_no_reports(log, publisher, redis_url, entry_id):
    await explorer(log, 0).publish(RUNNING)
    payload = EnvelopeFactory(log.run_id, 1, new_producer("explorer", 1)).next(RUNNING)
    await log._redis.xadd(log.keys.reports, {"e": payload}, id=entry_id)
    async with reducer_task(redis_url, log.run_id):
        await reports_accepted(log)
        await explorer(log, 2).publish(RUNNING)
        await folded(log)
    state = await current_state(log)
    assert sorted(state.explorers) == ["explorer-0", "explorer-1", "explorer-2"]
    assert position(await log.last_id()) < position(FAR), "times of the run are those of the clock"


@pytest.mark.parametrize("place", PLACES)
async def test_reports_are_moved_once_when_the_connection_is_cut(
    proxy, publisher, log, run_id, place
):
    """1, with a leader that does not know if its copy was done"""
    fault = proxy.cut(place, script(":reported"))
    async with reducer_task(proxy.url, run_id):
        for _ in range(3):
            await explorer(log, 1).publish(SyncRequested())
            await reports_accepted(log)
    assert fault.struck.is_set()
    reported = [decode_envelope(payload).producer.role for payload in await payloads(log)]
    assert reported.count("explorer") == 3


async def test_a_run_that_was_closed_takes_the_last_reports_of_its_explorers(
    log, publisher, client, redis_url
):
    report = explorer(log)
    await report.publish(RUNNING)
    await publisher.publish(RunClosed(reason="finished"))
    async with connect(redis_url, retry=False) as own, anyio.create_task_group() as tasks:

        async def reduce():
            await reduce_run(own, log.run_id, None, until_closed=True)

        tasks.start_soon(reduce)
        await until(lambda: is_closed(log))
        await report.publish(STOPPED)
    state = await current_state(log)
    assert state.explorers["explorer-0"].status == "stopped"


async def is_closed(log):
    return (await current_state(log)).closed is not None and not await log.has_reports()


async def test_the_pipeline_in_memory_takes_reports_too():
    async with Pipeline("run") as run:
        await run.publisher("explorer", 2).publish(RUNNING)
        await run.settled()
        assert run.state.explorers["explorer-2"].status == "running"


async def test_a_replay_of_the_events_alone_gives_what_was_announced(log, publisher, redis_url):
    """4"""
    async with reducer_task(redis_url, log.run_id):
        await explorer(log).publish(RUNNING)
        await publisher.publish(committed(1, "weights"))
        await explorer(log).publish(STOPPED)
        await folded(log)
    report = verify(await recorded(log))
    assert report.sound, report.findings
