"""Runs and processes of version 1 of the contract, beside those of this one."""

import time

import pytest
from msgspec import structs

from tests.support.pipeline import folded, recorded, reducer_task, until
from tests.support.recorded_logs import FOLDER
from trinity_events.archive import read_recording
from trinity_events.archive.export import Recording, import_recording
from trinity_events.archive.verify import verify
from trinity_events.log import RedisEventLog, Stream, open_run
from trinity_events.replay import current_state
from trinity_schemas import (
    Envelope,
    EpochOpened,
    ExplorerStatusChanged,
    Producer,
    RunOpened,
    decode_envelope,
    encode,
)

FIRST = {"epoch": 1, "sequence": 1, "occurred_at": time.time()}


def producer(role):
    return Producer(role=role, rank=0, node="old", incarnation="0123456789abcdef")


async def openings(log):
    entries = await log.read(stream=Stream.ANNOUNCEMENTS, limit=100_000)
    events = [decode_envelope(entry.payload).event for entry in entries]
    return [event for event in events if isinstance(event, EpochOpened)]


async def test_a_run_of_version_1_is_resumed_and_its_whole_log_is_sound(client, redis_url, run_id):
    old = read_recording(FOLDER / "complete.jsonl")
    header, *streams = Recording(old.header, *(list(part) for part in old[1:]))
    renamed = [[_with_run(entry, run_id) for entry in stream] for stream in streams[:2]]
    await import_recording(
        client, Recording(structs.replace(header, run_id=run_id), *renamed, streams[2])
    )
    log = RedisEventLog(client, run_id)
    async with reducer_task(redis_url, run_id):
        await folded(log)
        assert await openings(log) == [], "what is old is not announced again"
        epoch = await open_run(client, run_id, resume_from=2, config="{}")
        await until(lambda: _is_announced(log, epoch))
        await folded(log)
    [opening] = await openings(log)
    assert (opening.epoch, opening.step, opening.config) == (epoch, 2, "{}")
    report = verify(await recorded(log))
    assert report.sound, report.findings


def _with_run(entry, run_id):
    envelope = structs.replace(decode_envelope(entry.payload), run_id=run_id)
    return entry._replace(payload=encode(envelope))


async def _is_announced(log, epoch):
    return epoch in [event.epoch for event in await openings(log)]


@pytest.mark.usefixtures("publisher")
async def test_an_explorer_of_version_1_is_heard_where_it_may_append(log, redis_url, run_id):
    running = ExplorerStatusChanged(status="running")
    await log.append(
        encode(Envelope(run_id=run_id, producer=producer("explorer"), event=running, **FIRST))
    )
    async with reducer_task(redis_url, run_id):
        await folded(log)
    assert (await current_state(log)).explorers["explorer-0"].status == "running"


async def test_an_opening_of_version_1_is_not_announced(client, redis_url, run_id):
    """Its explorers read the events; one of this version says that it finds no epoch."""
    log = RedisEventLog(client, run_id)

    def opening(epoch):
        envelope = Envelope(
            run_id=run_id, producer=producer("trainer"), event=RunOpened(config="{}"), **FIRST
        )
        return encode(structs.replace(envelope, epoch=epoch))

    assert await log.open_epoch(opening) == 1
    async with reducer_task(redis_url, run_id):
        await folded(log)
    assert (await current_state(log)).epoch == 1
    assert await openings(log) == []
