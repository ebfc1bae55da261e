"""``trinity-events tail`` reads what it prints, page by page."""

import json
from pathlib import Path

import pytest

from tests.support.pipeline import announced, publish_steps, reducer_task
from trinity_events.cli.tail import _tail, _TailOptions
from trinity_events.log import RedisEventLog, Stream, page_size, position
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


async def printed(capsys, redis_url, run_id, lines):
    await _tail(redis_url, run_id, Path(), _TailOptions(lines=lines, form="json"))
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(record["id"], record["stream"]) for record in records]


@pytest.mark.parametrize("lines", [0, 1, 2, 5, 99, 10**9])
async def test_the_last_entries_of_both_streams_are_printed_in_order(
    whole, capsys, redis_url, run_id, lines
):
    assert await printed(capsys, redis_url, run_id, lines) == whole[max(0, len(whole) - lines) :]


async def test_of_a_long_log_only_the_end_is_read(whole, pages, capsys, redis_url, run_id):
    await printed(capsys, redis_url, run_id, 3)
    assert sum(len(page) for page in pages) <= 20 < len(whole)


async def test_few_large_entries_are_held_at_once(
    log, publisher, pages, capsys, redis_url, run_id, monkeypatch
):
    monkeypatch.setattr(page_size, "PAGE_BYTES", 100_000)
    for _ in range(300):
        await log.append(b"\xff" * 10_000)
    assert len(await printed(capsys, redis_url, run_id, 300)) == 300
    assert max(len(page) for page in pages) <= 64, "of which the size was not known before"
