"""The log on the server stays small, and what is taken from it is kept and still wanted by none."""

import subprocess
import sys
import threading

import anyio
import pytest
from msgspec.structs import replace

from tests.support.errors import raises
from tests.support.pipeline import (
    TWO_SEGMENTS,
    announced,
    events_of,
    is_folded,
    publish_steps,
    recorded,
    reducer_task,
    trimming,
    until,
)
from tests.support.waits import PATIENCE
from trinity_events.archive import Archive, ArchiveMissing, verify
from trinity_events.archive.continuation import common_part
from trinity_events.archive.export import whole_stream
from trinity_events.core import decode_state
from trinity_events.log import (
    AsyncPublisher,
    MemoryEventLog,
    RedisEventLog,
    Stream,
    new_producer,
    opening_envelope,
)
from trinity_events.reducer import ArchiveLimits, FoldLimits, Policy, Reducer, ReducerTimeouts
from trinity_events.reducer.log_retention import LogRetention
from trinity_events.replay import Replay, current_state, load_monitor
from trinity_schemas import ConsumerDetached, RunClosed, RunOpened, StepReady


async def test_the_server_keeps_the_newest_entries_alone_and_the_archive_all(
    publisher, log, redis_url, run_id, tmp_path
):
    archive = Archive(tmp_path / run_id, run_id)
    async with reducer_task(redis_url, run_id, tmp_path, trimming(30)):
        for first in range(1, 101, 10):
            await publish_steps(publisher, range(first, first + 10))
            await until(lambda: is_folded(log))
        # Two segments of thirty entries or so, and what came since the last snapshot.
        await until(lambda: _has_at_most(log, Stream.EVENTS, 120))
        await until(lambda: _has_at_most(log, Stream.ANNOUNCEMENTS, 120))
    recording = await recorded(log, archive)
    assert len(recording.events) == 301
    assert verify(recording, (await log.load())[0]).sound
    replay = Replay(run_id)
    replay.feed(recording.events)
    assert replay.state == await current_state(log)


async def _has_at_most(log, stream, most):
    return len(await log.read(stream=stream, limit=10_000)) <= most


async def test_the_archive_waits_while_there_is_a_backlog_to_fold(run_id):
    # Two unarchived snapshots are too many; that the backlog was there before makes it wait.
    fold = FoldLimits(batch_entries=10, snapshot_entries=20, unarchived_snapshots=2)
    log, positions, folded_at = MemoryEventLog(run_id), [], []
    await _fill(log, 50)
    token, _ = await log.lead(60)

    async def keep(position):
        folded_at.append((await log.load())[1])
        positions.append(position)  # last: the test ends the reducer on it

    scope = anyio.CancelScope()
    async with anyio.create_task_group() as tasks:

        async def run():
            with scope:
                await Reducer(log, None, token, keep, policy=Policy(fold=fold)).run()

        tasks.start_soon(run)
        await until(lambda: positions)
        scope.cancel()
    assert folded_at == [log.last_id_now()], "once, when all was folded"
    assert len(positions) == 1


async def test_what_a_leader_died_before_it_archived_is_archived_by_the_next(run_id):
    policy = Policy(fold=FoldLimits(snapshot_entries=10))
    log, positions = MemoryEventLog(run_id), []
    await _fill(log, 5)

    async def dies(position):
        scope.cancel()

    async def keep(position):
        positions.append(position)
        scope.cancel()

    for archiving in (dies, keep):
        token, _ = await log.lead(60)
        with anyio.fail_after(PATIENCE), anyio.CancelScope() as scope:
            await Reducer(log, None, token, archiving, policy=policy).run()
        await log.renew(token, 0)
    state = decode_state((await log.load())[0])
    assert positions == [state.position], "although nothing came that would make a snapshot due"


async def _fill(log, steps):
    epoch = await log.open_epoch(opening_envelope(log.run_id, RunOpened()))
    publisher = AsyncPublisher(log, epoch, new_producer("trainer"))
    await publish_steps(publisher, range(1, steps + 1))
    return publisher


async def test_a_backlog_too_long_to_wait_for_is_archived_while_it_is_folded(run_id):
    fold = FoldLimits(batch_entries=10, snapshot_entries=10, unarchived_snapshots=2)
    log, positions = FilledLater(run_id), []
    token, _ = await log.lead(60)

    async def keep(position):
        positions.append(position)

    scope = anyio.CancelScope()
    async with anyio.create_task_group() as tasks:

        async def run():
            with scope:
                await Reducer(log, None, token, keep, policy=Policy(fold=fold)).run()

        tasks.start_soon(run)
        await log.fill(50)
        await until(lambda: len(positions) > 3)
        scope.cancel()


class FilledLater(MemoryEventLog):
    """Its entries come all at once, after a reducer has begun."""

    def __init__(self, run_id):
        super().__init__(run_id)
        self._begun, self._filled = anyio.Event(), anyio.Event()

    async def read(self, *args, **kwargs):
        self._begun.set()
        await self._filled.wait()
        return await super().read(*args, **kwargs)

    async def fill(self, steps):
        await self._begun.wait()
        await _fill(self, steps)
        self._filled.set()


async def test_a_backlog_is_folded_no_faster_than_it_can_be_archived(run_id):
    fold = FoldLimits(batch_entries=10, snapshot_entries=10, unarchived_snapshots=2)
    log, goes_on, reached = FilledLater(run_id), anyio.Event(), anyio.Event()
    token, _ = await log.lead(60)

    async def keep(position):
        reached.set()
        await goes_on.wait()

    scope = anyio.CancelScope()
    async with anyio.create_task_group() as tasks:

        async def run():
            with scope:
                await Reducer(log, None, token, keep, policy=Policy(fold=fold)).run()

        tasks.start_soon(run)
        await log.fill(50)
        await reached.wait()
        for _ in range(1000):  # it had every chance to go on
            await anyio.sleep(0)
        assert not await is_folded(log)
        goes_on.set()
        await until(lambda: is_folded(log))
        scope.cancel()


@pytest.mark.parametrize("fails", ["by saying so", "by raising"])
async def test_archiving_that_failed_is_tried_again_although_nothing_more_comes(run_id, fails):
    policy = Policy(timeouts=ReducerTimeouts(archive_retry=0.05, reconcile_every=0.05))
    log, positions = MemoryEventLog(run_id), []
    publisher = await _fill(log, 5)
    await publisher.publish(RunClosed(reason="finished"))
    token, _ = await log.lead(60)

    async def keep(position):
        positions.append(position)
        if len(positions) < 3 and fails == "by raising":
            raise RuntimeError("the disk is gone")
        return len(positions) == 3

    with anyio.fail_after(PATIENCE):
        reducer = Reducer(log, None, token, keep, policy=policy)
        assert await reducer.run(until_closed=True)
    assert positions == [log.last_id_now()] * 3, "a run that is over is left once it is kept"


async def test_a_disk_that_works_again_is_archived_to(
    publisher, log, redis_url, run_id, tmp_path, caplog
):
    policy = Policy(timeouts=ReducerTimeouts(archive_retry=0.05))
    folder = tmp_path / run_id / "log"
    folder.parent.mkdir()
    folder.write_text("no folder")
    async with reducer_task(redis_url, run_id, tmp_path, policy):
        await publish_steps(publisher, [1])
        await publisher.publish(RunClosed(reason="finished"))
        await until(lambda: "it stays on the server until it can" in caplog.text)
        folder.unlink()
        archive = Archive(tmp_path / run_id, run_id)
        await until(lambda: archive.through(Stream.ANNOUNCEMENTS) != "0-0")
    assert caplog.text.count("it stays on the server") == 1
    assert list(archive.read(Stream.EVENTS)) == await log.read()


KILLED = """
import os, sys
from pathlib import Path
from trinity_events.archive.format import Header, lines_written
with lines_written(Path(sys.argv[1]), Header(run_id="run")):
    os._exit(9)
"""


@pytest.mark.processes
async def test_what_a_leader_that_was_killed_while_it_archived_has_left_is_removed(
    log, run_id, tmp_path
):
    archive = Archive(tmp_path, run_id)
    name = "events.1-0.2-0.2.after-gap.jsonl"
    command = [sys.executable, "-c", KILLED, str(archive.folder / name)]
    assert subprocess.run(command, check=False).returncode == 9
    [partial] = archive.folder.iterdir()
    assert partial.name.startswith(f".{name}.")
    others = {archive.folder / other for other in (".events", "events.jsonl.gz", ".mine.jsonl.x")}
    for other in others:
        other.touch()
    await LogRetention(log, archive, 1).begin()
    assert set(archive.folder.iterdir()) == others


class TrimmedJustThen(MemoryEventLog):
    """The leader trims it before its first answer."""

    async def read(self, *args, **kwargs):
        if not self._streams[Stream.EVENTS].trimmed:
            await self.trim(Stream.EVENTS, self.read_now()[-1].id)
        return await super().read(*args, **kwargs)


async def test_an_archive_is_of_the_log_that_is_trimmed_while_it_is_looked_at(run_id, tmp_path):
    log, archive = TrimmedJustThen(run_id), Archive(tmp_path, run_id)
    await _fill(log, 3)
    entries = log.read_now()
    archive.add(Stream.EVENTS, entries[:-1])
    last, end = entries[-2].id, entries[-1].id
    assert await common_part(archive, log, Stream.EVENTS) == (last, end)


async def test_an_archive_ahead_of_its_server_trims_nothing_that_is_yet_to_fold(
    publisher, log, run_id, tmp_path
):
    await publish_steps(publisher, range(1, 11))
    archive = Archive(tmp_path / run_id, run_id)
    entries, after = await log.read(), "0-0"
    for first in range(0, len(entries), 3):
        segment = entries[first : first + 3]
        archive.add(Stream.EVENTS, segment, after)
        after = segment[-1].id
    folded = entries[5].id
    token, _ = await log.lead(60)
    await LogRetention(log, archive, token, TWO_SEGMENTS)(folded)
    assert (await log.read(limit=1))[0].id == folded


async def test_an_archive_that_lacks_what_the_server_has_dropped_says_so_when_it_is_read(
    publisher, log, run_id, tmp_path
):
    limits = replace(TWO_SEGMENTS, page_entries=5, segment_events=5)
    elsewhere, archive = Archive(tmp_path / "a", run_id), Archive(tmp_path / "b", run_id)
    token, _ = await log.lead(60)
    for number, into in enumerate((elsewhere, archive, elsewhere)):
        await publish_steps(publisher, range(10 * number + 1, 10 * number + 11))
        await LogRetention(log, into, token, limits)(await log.last_id())
    for store in (elsewhere, archive):
        with raises(ArchiveMissing, fault="segment", folder=store.folder):
            list(store.read(Stream.EVENTS))
    first = await log.first_retained_id(Stream.EVENTS)
    assert list(elsewhere.read(Stream.EVENTS, first)), "of what follows on it nothing is missing"
    # Once the segments lie together, all is there.
    for segment in archive.folder.iterdir():
        segment.rename(elsewhere.folder / segment.name)
    assert len(list(elsewhere.read(Stream.EVENTS))) == 91


async def test_short_segments_leave_as_much_on_the_server_as_long_ones(log, run_id, tmp_path):
    limits = ArchiveLimits(server_events=10, server_announcements=10)
    archive = Archive(tmp_path / run_id, run_id)
    token, _ = await log.lead(60)
    for number in range(30):  # as after as many snapshots, of one entry each
        await log.append(b"%d" % number)
        await LogRetention(log, archive, token, limits)(await log.last_id())
    assert [entry.payload for entry in await log.read()] == [
        b"%d" % number for number in range(20, 30)
    ]


async def test_few_large_entries_are_enough_on_the_server(log, run_id, tmp_path):
    limits = ArchiveLimits(server_bytes=4000)
    archive = Archive(tmp_path / run_id, run_id)
    token, _ = await log.lead(60)
    for _ in range(9):
        await log.append(bytes(1000))
        await LogRetention(log, archive, token, limits)(await log.last_id())
    assert len(await log.read()) == 3, "1,500 bytes each, in files"


@pytest.mark.parametrize("limit", [5000, 0])
async def test_what_was_archived_of_a_log_that_the_server_lost_is_set_aside(
    log, run_id, tmp_path, caplog, limit
):
    limits = ArchiveLimits(server_events=limit, server_announcements=limit)
    archive, ours = Archive(tmp_path / run_id, run_id), RedisEventLog(log._redis, f"{run_id}-new")
    await _archived(log, archive, range(50), limits)
    await _archived(ours, archive, range(100, 120), limits)
    payloads = [entry.payload for entry in archive.read(Stream.EVENTS)]
    assert payloads == [b"%d" % number for number in range(100, 120)]
    assert [entry.payload async for entry in whole_stream(ours, Stream.EVENTS, archive)] == payloads
    assert "it lost its data, or failed over" in caplog.text
    [lost] = archive.folder.glob("not-on-the-server-*")
    aside = Archive(tmp_path / "aside", run_id)
    aside.folder.parent.mkdir()
    lost.rename(aside.folder)
    assert [entry.payload for entry in aside.read(Stream.EVENTS)] == [
        b"%d" % number for number in range(50)
    ]


async def _archived(log, archive, numbers, limits):
    """A leader of its own archives entries, some at a time."""
    token, _ = await log.lead(60)
    keeper = LogRetention(log, archive, token, limits)
    await keeper.begin()
    for number in numbers:
        await log.append(b"%d" % number)
        if number % 10 == 9:
            await keeper(await log.last_id())
    await log._redis.delete(log.keys.leader)


async def test_after_a_failover_to_an_older_copy_the_archive_has_what_the_server_goes_on_with(
    log, client, run_id, tmp_path, caplog
):
    limits = ArchiveLimits(server_events=15, server_announcements=15)
    archive = Archive(tmp_path / run_id, run_id)
    await _archived(log, archive, range(45), limits)
    key = log.keys.events
    copy = await client.dump(key)
    oldest = (await log.read())[0]
    await _archived(log, archive, range(45, 100), limits)
    await client.restore(key, 0, copy, replace=True)
    read = [entry.payload async for entry in whole_stream(log, Stream.EVENTS, archive)]
    assert read == [b"%d" % number for number in range(45)], "also before anybody leads"
    await _archived(log, archive, range(200, 230), limits)
    expected = [b"%d" % number for number in (*range(45), *range(200, 230))]
    assert [entry.payload for entry in archive.read(Stream.EVENTS)] == expected
    assert [entry.payload async for entry in whole_stream(log, Stream.EVENTS, archive)] == expected
    assert caplog.text.count("which was archived") == 1
    assert oldest.payload != b"0", "it had been trimmed"


async def test_a_log_that_goes_on_from_its_archive_is_left_alone(log, run_id, tmp_path, caplog):
    archive = Archive(tmp_path / run_id, run_id)
    for first in (0, 20, 40):
        await _archived(log, archive, range(first, first + 20), TWO_SEGMENTS)
    await log._redis.xtrim(log.keys.events, maxlen=5, approximate=False)  # within a segment
    await _archived(log, archive, range(60, 80), TWO_SEGMENTS)
    assert [entry.payload for entry in archive.read(Stream.EVENTS)] == [
        b"%d" % number for number in range(80)
    ]
    assert "failed over" not in caplog.text


async def test_a_segment_of_large_entries_has_few_of_them(log, run_id, tmp_path):
    limits = ArchiveLimits(page_entries=2, segment_bytes=3000)
    ids = [await log.append(bytes(1000)) for _ in range(9)]
    archive = Archive(tmp_path / run_id, run_id)
    token, _ = await log.lead(60)
    await LogRetention(log, archive, token, limits)(ids[-1])
    lengths = [len(path.read_bytes().splitlines()) - 1 for path in archive.folder.iterdir()]
    assert sorted(lengths) == [1, 4, 4], "two pages have 3,000 bytes together"
    assert [entry.id for entry in archive.read(Stream.EVENTS)] == ids


async def test_a_long_backlog_is_trimmed_little_by_little_while_it_is_archived(
    publisher, log, run_id, tmp_path, monkeypatch
):
    limits = replace(TWO_SEGMENTS, segments_per_trim=2, page_entries=3, segment_events=3)
    await publish_steps(publisher, range(1, 11))
    end, trimmed, plain = await log.last_id(), [], log.trim

    async def noted(stream, *args, **kwargs):
        trimmed.append(await plain(stream, *args, **kwargs))
        return trimmed[-1]

    monkeypatch.setattr(log, "trim", noted)
    token, _ = await log.lead(60)
    await LogRetention(log, Archive(tmp_path / run_id, run_id), token, limits)(end)
    remaining = len(await log.read())
    assert remaining == 31 - sum(trimmed)
    assert max(trimmed) <= 6 < sum(trimmed), "two segments of three at once"


async def test_a_disk_that_hangs_while_archiving_holds_up_no_announcement(
    publisher, log, redis_url, run_id, tmp_path, monkeypatch
):
    policy = Policy(fold=FoldLimits(snapshot_entries=2))
    hangs, reached = threading.Event(), threading.Event()
    add = Archive.add

    def slow(self, *args, **kwargs):
        reached.set()
        hangs.wait(PATIENCE)
        add(self, *args, **kwargs)

    monkeypatch.setattr(Archive, "add", slow)
    async with reducer_task(redis_url, run_id, tmp_path, policy):
        try:
            await publish_steps(publisher, [1])
            await until(reached.is_set)
            await publish_steps(publisher, [2, 3])
            events = [event for event in await announced(log, 3) if isinstance(event, StepReady)]
            assert [event.step for event in events] == [1, 2, 3]
        finally:
            hangs.set()
        archive = Archive(tmp_path / run_id, run_id)
        await until(lambda: archive.through(Stream.EVENTS) != "0-0")


async def test_a_group_that_is_gone_holds_up_the_log_until_it_is_detached(
    publisher, log, redis_url, run_id, tmp_path
):
    await log.create_group(Stream.EVENTS, "gone", "0-0")
    async with reducer_task(redis_url, run_id, tmp_path, trimming(10, group_idle=2.0)):
        for step in range(1, 11):
            await publish_steps(publisher, [step])
            await until(lambda: is_folded(log))
        assert await log.first_retained_id(Stream.EVENTS) is None or await events_of(
            log, ConsumerDetached
        ), "nothing that a group needs is trimmed"
        await until(lambda: events_of(log, ConsumerDetached))
        steps = iter(range(11, 1000))

        async def is_trimmed():
            await publish_steps(publisher, [next(steps)])
            return await log.first_retained_id(Stream.EVENTS) is not None

        await until(is_trimmed)


async def test_snapshots_are_taken_now_and_then_and_not_with_every_batch(run_id, monkeypatch):
    fold = FoldLimits(batch_entries=10, snapshot_entries=70)
    log, snapshots = MemoryEventLog(run_id), []
    await _fill(log, 50)
    commit = log.commit

    async def counted(batch):
        snapshots.append(batch.snapshot is not None)
        return await commit(batch)

    monkeypatch.setattr(log, "commit", counted)
    token, _ = await log.lead(60)
    with anyio.move_on_after(20) as scope:

        async def stop_when_folded():
            await until(lambda: is_folded(log))
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop_when_folded)
            await Reducer(log, None, token, policy=Policy(fold=fold)).run()
    assert len(snapshots) == 16
    assert snapshots.count(True) == 2
    monitor = (await load_monitor(log)).monitor
    anew = Replay(run_id)
    anew.feed(log.read_now(limit=10_000))
    assert monitor.state == anew.state
