"""Viewers follow a run, and cannot disturb it or one another."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from functools import partial
from itertools import islice

import anyio
import pytest

from tests.support.dashboards import (
    Stream,
    dashboard,
    put_run,
    server_runs,
)
from tests.support.waits import PATIENCE
from trinity_events.core import MonitorState, encode_state
from trinity_events.core.fold import Monitor
from trinity_events.dashboard import run_reader
from trinity_events.dashboard.board import DashboardLimits
from trinity_events.dashboard.simulated_run import Plan, simulated_run
from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer, position
from trinity_events.log import Stream as Streams
from trinity_schemas import RunKeys, TrainerStatusChanged

pytestmark = pytest.mark.server


def plan_of(run_id, **keywords):
    given = {"ranks": 2, "explorers": 2, "steps": 3, "faults": False, **keywords}
    return Plan(run_id=run_id, **given)


@pytest.fixture
def limits(request):
    """The limits of the dashboard; tests that set some are parametrized with :func:`limited`."""
    return DashboardLimits(**getattr(request, "param", {}))


def limited(**limits):
    """Limit the dashboard of a test."""
    return pytest.mark.parametrize("limits", [limits], indirect=True, ids=[""])


@pytest.fixture
async def at(client, limits):
    async with dashboard(server_runs(client), limits=limits) as served:
        yield served


def publisher_of(log: RedisEventLog):
    return AsyncPublisher(log, 1, new_producer("trainer"))


async def test_an_event_reaches_all_viewers_of_its_run(client, log, run_id, at):
    await put_run(client, run_id, simulated_run(plan_of(run_id)))
    async with AsyncExitStack() as exits:
        streams = [await exits.enter_async_context(Stream.of(at, run_id)) for _ in range(3)]
        for stream in streams:
            assert (await stream.until(lambda state: state["progress"] == 1))["step"] == 3
        await publisher_of(log).publish(TrainerStatusChanged(status="running", step=77))
        for stream in streams:
            await stream.until(lambda state: state["step"] == 77)


async def test_commands_do_not_grow_with_the_number_of_viewers(client, log, run_id, at):
    await put_run(client, run_id, simulated_run(plan_of(run_id)))
    publisher = publisher_of(log)
    step = 100

    async def commands(viewers):
        nonlocal step
        async with AsyncExitStack() as exits:
            streams = [
                await exits.enter_async_context(Stream.of(at, run_id)) for _ in range(viewers)
            ]
            for stream in streams:
                await stream.until(lambda state: state["progress"] == 1)
            before = await _commands(client)
            for _ in range(10):
                step += 1
                await publisher.publish(TrainerStatusChanged(status="running", step=step))
                for stream in streams:
                    await stream.until(partial(_is_at, step))
            return await _commands(client) - before

    # Each event is read once, however many viewers there are; a few reads more end without one.
    assert await commands(1) < 25 * 10 / 2
    assert await commands(25) < 25 * 10 / 2


def _is_at(step, state):
    return state["step"] == step


def _has(number, state):
    return state["number"] >= number


async def _commands(client):
    """The reads of events that the server was asked for."""
    stats = await client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("xread", "xrange"))


@limited(send_seconds=1.0, frame_pause=0.0)
async def test_a_viewer_that_never_reads_is_dropped_and_others_go_on(client, log, run_id, at):
    plan = plan_of(run_id, explorers=300, steps=1)
    await put_run(client, run_id, simulated_run(plan))
    publisher = AsyncPublisher(log, 1, new_producer("trainer"))
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", at.port))
        silent.send(f"GET /api/runs/{run_id}/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        async with Stream.of(at, run_id) as reading:
            state = await reading.until(lambda state: state["progress"] == 1)
            number = state["number"]
            with anyio.fail_after(PATIENCE):
                while not _is_closed(silent):
                    number += 1
                    await publisher.publish(TrainerStatusChanged(status="running", step=1))
                    await reading.until(partial(_has, number))


def _is_closed(silent):
    """Return True once the other side has aborted the connection: nothing is read by it."""
    with_error = silent.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if with_error:
        return True
    try:
        silent.send(b"\r\n")
    except OSError:
        return True
    return False


@limited(turn_entries=5)
async def test_a_question_during_indexing_waits_for_its_entries(client, run_id, at):
    entries = list(simulated_run(plan_of(run_id, steps=60)))
    await put_run(client, run_id, entries)
    last = await at.json(f"/api/runs/{run_id}/at", entry=entries[-1].id)
    assert last["number"] == len(entries)


async def test_the_newest_state_and_timeline_are_shown_while_the_log_is_indexed(
    client, run_id, at, monkeypatch
):
    entries = list(simulated_run(plan_of(run_id, steps=200)))
    await put_run(client, run_id, entries)
    monitor = Monitor(MonitorState(run_id=run_id))
    monitor.fold(entries)
    keys = RunKeys.of(run_id)
    await client.mset({keys.snapshot: encode_state(monitor.state), keys.position: entries[-1].id})
    released = anyio.Event()
    index = run_reader.RunReader._index

    async def hold(reader, run_entries, nbytes):
        await released.wait()
        await index(reader, run_entries, nbytes)

    monkeypatch.setattr(run_reader.RunReader, "_index", hold)
    now = await at.json(f"/api/runs/{run_id}/now")
    assert (now["step"], now["position"], now["indexed"]) == (200, entries[-1].id, 0)
    end = position(entries[-1].id)[0]
    window = {"from": end - 60_000, "to": end, "rows": "actor-1,explorer-0"}
    early = await at.json(f"/api/runs/{run_id}/timeline", **window)
    released.set()
    await at.indexed(run_id)
    assert early == await at.json(f"/api/runs/{run_id}/timeline", **window)
    assert early["spans"]


async def test_a_run_that_is_opened_later_is_followed_from_its_first_event(client, run_id, at):
    entries = simulated_run(plan_of(run_id, steps=10))
    await put_run(client, run_id, islice(entries, 40))
    async with Stream.of(at, run_id) as stream:
        await stream.until(lambda state: state["number"] == 40)
        rest = await put_run(client, run_id, entries)
        await stream.until(lambda state: state["number"] == 40 + rest)


@limited(readers=2)
async def test_readers_that_nobody_looks_at_give_way_to_others(client, run_id, at):
    runs = [f"{run_id}-{number}" for number in range(4)]
    for run in runs:
        await put_run(client, run, simulated_run(plan_of(run)))
    for run in runs:
        await at.indexed(run)
    async with Stream.of(at, runs[0]) as first, Stream.of(at, runs[1]) as other:
        for stream in (first, other):
            await stream.until(lambda state: state["progress"] == 1)
        refused = await at.ask(f"/api/runs/{runs[2]}/now")
        assert refused.status == 503
        assert "2 runs are viewed at once" in refused.json["error"]
    with anyio.fail_after(PATIENCE):
        while (await at.ask(f"/api/runs/{runs[2]}/now")).status != 200:
            await asyncio.sleep(0.1)


async def test_consumer_groups_are_shown_with_what_is_pending(client, log, run_id, at):
    entries = await put_run(client, run_id, simulated_run(plan_of(run_id)))
    await log.create_group(Streams.EVENTS, "eval", "0-0")
    await log.read_group(Streams.EVENTS, "eval", "one", seconds=1, limit=3)
    async with Stream.of(at, run_id) as stream:
        state = await stream.until(lambda state: state["groups"])
    [[stream_name, name, _, pending, _, oldest, _, caught_up, lag, holder]] = state["groups"]
    assert (stream_name, name, pending, caught_up) == ("events", "eval", 3, False)
    assert holder == "one"
    assert lag == entries - 3
    assert oldest is not None
