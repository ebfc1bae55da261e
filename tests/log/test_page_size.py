"""What is read at once is bounded in bytes, and not only in number."""

from contextlib import asynccontextmanager

import anyio
import redis.asyncio

from tests.support.pipeline import until
from tests.support.waits import PATIENCE
from trinity_events.archive import Archive, Header, Recording, import_recording
from trinity_events.log import (
    AsyncPublisher,
    DeadLetter,
    Entry,
    MemoryEventLog,
    PageSize,
    RedisEventLog,
    Stream,
    new_producer,
    page_size,
)
from trinity_events.reducer import ArchiveLimits, FoldLimits, Policy
from trinity_events.reducer.log_retention import LogRetention
from trinity_events.reducer.reducer import Reducer
from trinity_events.replay import current_state
from trinity_events.subscriptions import subscription_on
from trinity_schemas import StepCommitted


def entries(count, nbytes):
    return [Entry(f"{number}-1", b"x" * nbytes) for number in range(count)]


def test_small_entries_are_read_as_many_at_once_as_may_be():
    page = PageSize(2000)
    limits = []
    while page.limit not in limits:
        limits.append(page.limit)
        page.learn(entries(page.limit, 400))
    assert limits == [16, 64, 256, 1024, 2000]


def test_large_entries_are_read_few_at_once_and_one_at_least():
    page = PageSize(2000)
    page.learn(entries(16, page_size.PAGE_BYTES // 10))
    assert page.limit == 10
    page.learn(entries(10, 2 * page_size.PAGE_BYTES))
    assert page.limit == 1
    page.learn([])
    assert page.limit == 1
    page.learn(entries(1, 100))
    assert page.limit == 4, "and more again when they are small again"


class Noting(MemoryEventLog):
    """Notes how many bytes come at once."""

    most = 0

    async def read(self, *args, **keywords):
        return self._noted(await super().read(*args, **keywords))

    async def read_blocking(self, *args, **keywords):
        page = await super().read_blocking(*args, **keywords)
        self._noted([entry for _, entry in page])
        return page

    def _noted(self, entries):
        self.most = max(self.most, sum(len(entry.payload) for entry in entries))
        return entries


async def test_a_reducer_and_the_archive_hold_few_large_entries_at_once(run_id, tmp_path):
    policy = Policy(fold=FoldLimits(page_bytes=100_000))
    log = Noting(run_id)
    for _ in range(500):
        await log.append(b"\xff" * 10_000)
    token, _ = await log.lead(60)
    most = 16 * 10_000  # the first page: nobody knows before how large they are
    assert most < 500 * 10_000 < policy.fold.batch_entries * 10_000
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Reducer(log, None, token, policy=policy).run)
            await until(lambda: log._position == log.last_id_now())
            scope.cancel()
    assert log.most <= most
    limits = ArchiveLimits(page_bytes=100_000)
    await LogRetention(log, Archive(tmp_path, run_id), token, limits)(log.last_id_now())
    assert log.most <= most


async def test_a_view_holds_few_large_entries_at_once(run_id):
    log, payload = Noting(run_id), b"\xff" * (page_size.PAGE_BYTES // 10)
    for _ in range(80):
        await log.append(payload)
    assert (await current_state(log)).dead_letters == 80
    assert 0 < log.most <= 16 * len(payload), "of the first page, whose sizes are not known yet"


async def test_a_follower_holds_few_large_events_at_once(run_id):
    large = page_size.PAGE_BYTES // 10
    log, reward = Noting(run_id), {"x" * large: 1.0}
    publisher = AsyncPublisher(log, 1, new_producer("trainer"))
    for step in range(80):
        await publisher.publish(StepCommitted(step=step, kind="weights", metrics=reward))

    @asynccontextmanager
    async def open_log():
        yield log

    events = subscription_on(
        open_log,
        run_id,
        StepCommitted,
        start="beginning",
        group=None,
        deadline=PATIENCE,
        claim_after=60,
    )
    async with events:
        assert [(await anext(events)).step for _ in range(80)] == list(range(80))
    assert log.most <= 16 * (large + 300)


async def test_an_import_sends_few_large_entries_at_once(client, run_id, monkeypatch):
    sent, execute = [], redis.asyncio.client.Pipeline.execute

    async def noted(pipe, *args, **keywords):
        values = [value for command in pipe.command_stack for value in command[0]]
        sent.append(sum(len(value) for value in values if isinstance(value, bytes)))
        return await execute(pipe, *args, **keywords)

    monkeypatch.setattr(redis.asyncio.client.Pipeline, "execute", noted)
    large = entries(40, 10_000)[1:]
    letters = [DeadLetter(entry, "too large") for entry in large]
    await import_recording(
        client, Recording(Header(run_id=run_id), large, large, letters), page_bytes=100_000
    )
    assert max(sent) < 120_000 < 39 * 10_000
    log = RedisEventLog(client, run_id)
    assert await log.read() == await log.read(stream=Stream.ANNOUNCEMENTS) == large
    assert await log.dead_letters() == letters
