"""A reducer's own seconds in the log, as leader and standby, and in the goodput of its run."""

from contextlib import AsyncExitStack

import pytest

from tests.support.pipeline import folded, publish_steps, reducer_task
from tests.support.waits import until
from trinity_events.analysis.goodput import GoodputReader
from trinity_events.log import ORIGIN, AsyncPublisher, new_producer, open_run
from trinity_events.log.position import position
from trinity_schemas import PhasesMeasured, RunClosed, TrainerStatusChanged, decode_envelope


@pytest.fixture
def read(log):
    """Return a function that reads the log: the reducer's reports, and the goodput."""

    async def read_log():
        reader, reports = GoodputReader(log.run_id), []
        for entry in await log.read(ORIGIN, limit=1000):
            envelope = decode_envelope(entry.payload)
            reader.add(position(entry.id)[0] / 1000, envelope)
            if isinstance(envelope.event, PhasesMeasured):
                reports.append((envelope.producer, envelope.epoch, envelope.event))
        return reports, reader.goodput()

    return read_log


async def test_the_leader_reports_its_seconds_of_each_epoch_that_is_open(
    publisher, log, client, redis_url, run_id, read
):
    trains = TrainerStatusChanged(status="running", step=0, lease=600.0)
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [1, 2])
        await folded(log)
        assert (await read())[0] == [], "no trainer lives"
        await publisher.publish(trains)

        async def is_reported(epoch, least):
            reports, _ = await read()
            return sum(number == epoch for _, number, _ in reports) >= least

        await until(lambda: is_reported(1, 2))
        await publisher.publish(RunClosed(reason="finished", step=2))
        await folded(log)
        reports, goodput = await read()
        assert {producer.role for producer, *_ in reports} == {"reducer"}
        assert reports[-1][2].seconds["folding"] > 0
        # It is there until the end of the epoch, without a last report.
        [worker] = goodput.workers
        assert (worker.process, worker.computes) == ("reducer-0", False)
        assert sum(worker.seconds.values()) == pytest.approx(goodput.elapsed, abs=1.0)
        assert not {"lost", "down"} & worker.seconds.keys()
        epoch = await open_run(client, run_id)
        later = AsyncPublisher(log, epoch, new_producer("trainer"))
        await later.publish(trains)
        await until(lambda: is_reported(2, 1))
    reports, goodput = await read()
    first, second = (
        {producer.incarnation for producer, number, _ in reports if number == epoch}
        for epoch in (1, 2)
    )
    assert len(first) == len(second) == 1 and first != second
    assert [worker.epoch for worker in goodput.workers] == [1, 2]


async def test_a_standby_reports_its_seconds_until_it_leads(
    publisher, log, redis_url, run_id, read
):
    async def is_reported(*, is_last):
        reports, _ = await read()
        return any(
            producer.role == "standby" and event.is_last == is_last
            for producer, _, event in reports
        )

    async with AsyncExitStack() as standby:
        async with reducer_task(redis_url, run_id):
            await publish_steps(publisher, [1])
            await publisher.publish(TrainerStatusChanged(status="running", step=0, lease=600.0))
            await folded(log)
            await standby.enter_async_context(reducer_task(redis_url, run_id))
            await until(lambda: is_reported(is_last=False))
        await until(lambda: is_reported(is_last=True))
        _, goodput = await read()
    workers = {worker.process: worker.seconds for worker in goodput.workers}
    assert set(workers["standby-0"]) == {"standing-by"}
    assert 0 < workers["standby-0"]["standing-by"] < goodput.elapsed
