"""``trinity-events tail`` reads what it prints, page by page."""

import json
from pathlib import Path

import pytest

from tests.support.pipeline import announced, publish_steps, reducer_task
from trinity_events.analysis.event_filter import EventFilter
from trinity_events.archive import Archive
from trinity_events.cli.last_entries import find_begin
from trinity_events.cli.tail import _tail, _TailOptions
from trinity_events.log import ORIGIN, RedisEventLog, Stream, page_size, position
from trinity_events.replay import read_all

STEPS = 40
"""Of three events and an announcement each."""


@pytest.fixture
async def whole(publisher, log, redis_url, run_id):
    """The entries of both streams, in the order in which they are printed."""
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, range(STEPS))
        await announced(log, STEPS)
    entries = [
        (position(entry.id), entry.id, s) for s in Stream async for entry in read_all(log, s)
    ]
    return [
        (entry_id, stream.value) for _, entry_id, stream in sorted(entries, key=lambda row: row[0])
    ]


@pytest.fixture
def pages(monkeypatch):
    """The number of entries of each page that is read."""
    read = []
    for name in ("read", "read_back", "read_blocking"):
        method = getattr(RedisEventLog, name)

        async def noted(*args, method=method, **keywords):
            read.append(await method(*args, **keywords))
            return read[-1]

        monkeypatch.setattr(RedisEventLog, name, noted)
    return read


async def printed(capsys, redis_url, run_id, lines, root=Path()):
    await _tail(redis_url, run_id, root, _TailOptions(lines=lines, form="json"))
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(record["id"], record["stream"]) for record in records]


@pytest.mark.parametrize("lines", [0, 1, 2, 5, 99, 10**9])
async def test_the_last_entries_of_both_streams_are_printed_in_order(
    whole, capsys, redis_url, run_id, lines
):
    assert await printed(capsys, redis_url, run_id, lines) == whole[max(0, len(whole) - lines) :]


@pytest.fixture
async def trimmed(whole, log, run_id, tmp_path):
    """All entries of an archived run, whose server has all events and the last announcements."""
    archive = Archive(tmp_path / run_id, run_id)
    for stream in Stream:
        entries = [entry async for entry in read_all(log, stream)]
        archive.add(stream, entries, ORIGIN)
    await log.trim(Stream.ANNOUNCEMENTS, entries[-10].id)
    return whole


@pytest.mark.parametrize("lines", [5, 30, 60, 100, 10**9])
async def test_announcements_that_only_the_archive_has_are_printed_between_the_events(
    trimmed, capsys, redis_url, run_id, tmp_path, lines
):
    expected = trimmed[max(0, len(trimmed) - lines) :]
    assert await printed(capsys, redis_url, run_id, lines, tmp_path) == expected


async def test_the_end_of_a_log_is_complete_unless_a_trimmed_stream_ran_out_before(trimmed, log):
    first_retained = position(await log.first_retained_id(Stream.ANNOUNCEMENTS))
    assert (await find_begin(log, 5, EventFilter())).all_there
    assert not (await find_begin(log, 60, EventFilter())).all_there
    assert (await find_begin(log, None, EventFilter(since=first_retained))).all_there
    second = EventFilter(since=position(trimmed[1][0]))
    assert not (await find_begin(log, None, second)).all_there


async def test_of_a_long_log_only_the_end_is_read(whole, pages, capsys, redis_url, run_id):
    await printed(capsys, redis_url, run_id, 3)
    assert sum(len(page) for page in pages) <= 20 < len(whole)


async def test_few_large_entries_are_held_at_once(log, publisher, pages, capsys, redis_url, run_id):
    for _ in range(60):
        await log.append(b"\xff" * (page_size.PAGE_BYTES // 20))
    assert len(await printed(capsys, redis_url, run_id, 60)) == 60
    assert max(len(page) for page in pages) == 20
