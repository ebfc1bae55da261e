"""The pipeline in memory that users test with, and the plugin that brings it."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import anyio
import pytest

from tests.support.errors import raises
from tests.support.event_histories import committed, finished, opened, part, registration, started
from tests.support.pipeline import OUTCOMES, announced, publish_steps, reducer_task
from tests.support.waits import PATIENCE, wait_until
from trinity_events import StepReady
from trinity_events.coordinator import staged_path
from trinity_events.errors import DeadlineExceeded, SaveError
from trinity_events.log import AsyncPublisher, RedisEventLog, Stream, new_producer, open_run
from trinity_events.replay import Replay, current_state, read_all
from trinity_events.server import connect
from trinity_events.testing import MemoryEventLog, Pipeline, SyncMemoryEventLog
from trinity_events.testing.pipeline import PipelineMisused
from trinity_schemas import (
    RunClosed,
    SaveFailed,
    SaveFinished,
    SaveStarted,
    StepSuperseded,
    encode,
    event_tag,
    to_json,
)

ROOT = Path(__file__).parents[2]
PLUGIN = "trinity_events.testing.plugin"


def ready(run):
    return [(event.kind, event.step) for event in run.announcements if isinstance(event, StepReady)]


def outcomes_of(run):
    return [event for event in run.announcements if isinstance(event, OUTCOMES)]


# The pipeline


async def test_what_is_published_is_folded_and_announced_by_the_time_it_is_settled():
    async with Pipeline("run") as run:
        trainer = run.publisher("trainer")
        await trainer.publish(committed(1, "state_dict", registration()))
        await run.settled()
        assert outcomes_of(run) == []
        before = run.state
        cause = await run.publisher("actor").publish(finished(1))
        await run.settled()
        [announcement] = outcomes_of(run)
        assert (announcement.step, announcement.caused_by) == (1, cause)
        assert run.state.ready["state_dict"].at.step == 1
        assert "state_dict" not in before.ready, "a state once taken stays as it was"
    assert [event_tag(type(event)) for event in run.events] == [
        "run-opened",
        "step-committed",
        "save-finished",
    ]


async def test_saves_really_run_in_threads_and_are_told_from_there():
    async with Pipeline("run") as run:
        coordinator = run.coordinator("actor", 3)
        threads, release = [], threading.Event()

        def save():
            release.wait(PATIENCE)
            threads.append(threading.current_thread())

        coordinator.save_async("model", save, 5, is_state_dict=True)
        await coordinator.register_and_monitor(5, is_state_dict=True, state_dict_thread_count=1)
        await run.settled()
        assert ready(run) == []
        release.set()
        coordinator.wait_all()  # holds the event loop up: what saves say does not need it
        await run.settled()
        assert ready(run) == [("state_dict", 5)]
    assert threads != [threading.current_thread()]
    [done] = [event for event in run.events if isinstance(event, SaveFinished)]
    assert (done.slot.role, done.slot.rank) == ("actor", 3)


async def test_a_save_may_run_on_the_thread_of_the_loop():
    async with Pipeline("run") as run:
        run.coordinator().save_sync(lambda: None, 5)
        await run.settled()
        assert [type(event) for event in run.events[1:]] == [SaveStarted, SaveFinished]


async def test_two_saves_that_a_worker_makes_without_a_name_are_two_of_a_step():
    async with Pipeline("run") as run:
        coordinator = run.coordinator()
        with pytest.raises(ZeroDivisionError):
            coordinator.save_sync(lambda: 1 / 0, 5)
        coordinator.save_sync(lambda: None, 5)
        await coordinator.register_and_monitor(5, checkpoint_thread_count=2)
        await run.settled()
        assert ready(run) == [], "one of two"
        coordinator.save_sync(lambda: None, 5)
        coordinator.save_sync(lambda: None, 5, is_state_dict=True)
        await run.settled()
        done = [event.slot for event in run.events if isinstance(event, SaveFinished)]
        assert [(slot.kind, slot.name) for slot in done] == [
            ("checkpoint", "save_sync"),
            ("checkpoint", "save_sync-2"),
            ("state_dict", "save_sync"),
        ]
        assert ready(run) == [("checkpoint", 5)]


async def test_a_step_that_a_worker_saves_again_elsewhere_has_the_same_slots(tmp_path):
    async with Pipeline("run", checkpoint_folder=tmp_path / "run") as run:
        coordinator = run.coordinator()
        for _ in range(2):
            folder = staged_path(tmp_path / "run", 1, 5)
            folder.mkdir(parents=True)
            for name in ("model.pt", "optim.pt"):
                write = partial((folder / name).write_text, name)
                coordinator.save_sync(write, 5, path=folder / name)
        await coordinator.register_and_monitor(5, checkpoint_thread_count=2)
        await run.settled()
        assert ready(run) == [("checkpoint", 5)]
        done = [event.slot.name for event in run.events if isinstance(event, SaveFinished)]
        assert done == ["save_sync", "save_sync-2"] * 2


async def test_a_save_that_fails_fails_its_step():
    async with Pipeline("run") as run:
        coordinator = run.coordinator()
        coordinator.save_async("model", lambda: 1 / 0, 5)
        with raises(SaveError, __cause__=re.compile("division by zero")):
            coordinator.wait_all()
        await coordinator.register_and_monitor(5, checkpoint_thread_count=1)
        await run.settled()
        [announcement] = outcomes_of(run)
        assert (event_tag(type(announcement)), announcement.step) == ("step-failed", 5)
        assert any(isinstance(event, SaveFailed) for event in run.events)


async def test_the_files_follow_the_state_by_the_time_it_is_settled(tmp_path):
    folder = tmp_path / "checkpoints"
    async with Pipeline("run", checkpoint_folder=folder) as run:
        coordinator = run.coordinator()
        for step in (1, 2):
            staged = staged_path(folder, run.epoch, step)
            path = staged / "actor" / "model.pt"
            path.parent.mkdir(parents=True)
            coordinator.save_async("model", lambda to=path: to.write_bytes(b"w"), step, path=path)
            coordinator.wait_all()
            await coordinator.register_and_monitor(step, checkpoint_thread_count=1)
            await run.settled()
            assert (folder / f"global_step_{step}" / "actor" / "model.pt").read_bytes() == b"w"
            assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(step)
        await run.resume(1)
        await run.settled()
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == "1"


async def test_a_resume_opens_the_next_epoch_of_which_publishers_are_given():
    async with Pipeline("run") as run:
        old = run.publisher("trainer")
        await run.make_ready(5, "checkpoint")
        assert await run.resume(3) == 2
        await old.publish(committed(6, "checkpoint", registration("checkpoint", 0)))
        await run.make_ready(4, "checkpoint")
        assert ready(run) == [("checkpoint", 5), ("checkpoint", 4)]
        assert (run.state.epoch, run.publisher("trainer").epoch) == (2, 2)


@pytest.mark.parametrize("kind", ["weights", "state_dict", "checkpoint"])
async def test_a_step_of_any_kind_can_be_made_ready(kind):
    async with Pipeline("run") as run:
        await run.make_ready(1, kind)
        await run.make_ready(2, kind)
        assert ready(run)[-1] == (kind, 2)
        assert run.state.anomalies == []


async def test_a_subscription_without_its_event_fails_by_itself():
    async with Pipeline("run") as run, run.subscribe(StepReady, deadline=0.05) as events:
        with raises(DeadlineExceeded, missing="no step-ready of run run came", deadline=0.05):
            await anext(aiter(events))


async def test_what_reads_a_log_reads_the_twins(tmp_path):
    async with Pipeline("run") as run:
        await publish_steps(run.publisher("trainer"), range(20))
        await run.log.append(b"\xff not an event")
        await run.publisher("trainer").publish(RunClosed(reason="finished"))
        await run.settled()
        replay = Replay("run")
        payloads = []
        async for entry in read_all(run.log):
            payloads += [encode(e) for folded in replay.feed([entry]) for e in folded.announcements]
        assert payloads == [
            entry.payload async for entry in read_all(run.log, Stream.ANNOUNCEMENTS)
        ]
        assert replay.state == run.state == await current_state(run.log)
        [letter] = await run.log.dead_letters()
        assert letter.entry.payload == b"\xff not an event"


async def test_the_twin_announces_what_the_server_announces(redis_url, run_id):
    history = [
        *(opened(1), part(1), committed(1, "weights"), started(1), finished(1)),
        committed(1, "state_dict", registration()),
        *(started(2, "slow", kind="checkpoint"), started(3, "b", kind="checkpoint")),
        committed(2, "checkpoint", registration("checkpoint", name="two")),
        finished(3, "b", kind="checkpoint"),
        committed(3, "checkpoint", registration("checkpoint", name="three")),
        finished(2, "slow", kind="checkpoint"),
    ]

    async def publish(trainer):
        for event in history:
            await trainer.publish(event)

    def without_causes(announcements):
        return [{**to_json(announcement), "caused_by": None} for announcement in announcements]

    async with Pipeline(run_id) as run:
        await publish(run.publisher("trainer"))
        await run.settled()
        twins = without_causes(outcomes_of(run))
    async with connect(redis_url) as client, reducer_task(redis_url, run_id):
        log = RedisEventLog(client, run_id)
        trainer = AsyncPublisher(log, await open_run(client, run_id), new_producer("trainer"))
        await publish(trainer)
        assert without_causes(await announced(log, len(twins))) == twins
    assert any(isinstance(event, StepSuperseded) for event in run.announcements)


async def test_a_reducer_that_fails_fails_the_test_and_not_its_patience(monkeypatch):
    monkeypatch.setattr("trinity_events.core.fold.Monitor.fold", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        async with Pipeline("run") as run:
            await run.settled()
    with pytest.raises(ZeroDivisionError):
        async with Pipeline("run") as run:
            await anyio.sleep(0.05)


async def test_a_wait_to_settle_says_how_far_the_reducer_is(monkeypatch):
    async with Pipeline("run") as run:
        await run.settled()
        run._scope.cancel()
        await anyio.sleep(0)
        run._reducer = asyncio.create_task(asyncio.sleep(60))  # one that hangs
        await run.publisher("trainer").publish(committed(1))
        with raises(DeadlineExceeded, deadline=0.05, reason=re.compile(r"idle at \d+-0, ")):
            await run.settled(0.05)
        run._reducer.cancel()


async def test_a_pipeline_is_entered_once_at_a_time_and_may_go_on_later():
    run = Pipeline("run")
    with raises(PipelineMisused, fault="outside", run_id="run"):
        run.publisher("trainer")
    async with run:
        await run.make_ready(1)
        with raises(PipelineMisused, fault="running", run_id="run"):
            await run.__aenter__()
        with raises(PipelineMisused, fault="other", run_id="run"):
            await Pipeline(log=run.log).__aenter__()
    with raises(PipelineMisused, fault="outside", run_id="run"):
        await run.settled()
    async with Pipeline(log=run.log) as later:
        assert later.epoch == 2
        await later.make_ready(2)
        assert ready(later) == [("weights", 1), ("weights", 2)]


async def test_it_may_be_left_in_another_task_as_fixtures_are():
    run = Pipeline("run")
    await asyncio.create_task(run.__aenter__())
    await run.make_ready(1)
    await asyncio.create_task(run.__aexit__(None, None, None))


def test_one_log_serves_several_event_loops_and_outlives_them():
    log = MemoryEventLog("run")
    received = []

    def wait():
        received.append(asyncio.run(log.read_blocking({Stream.EVENTS: "0-0"}, seconds=PATIENCE)))

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(log._waiting) >= 2)
    entry_id = SyncMemoryEventLog(log).append(b"for both")
    for thread in threads:
        thread.join(PATIENCE)
    assert [[entry.id for _, entry in each] for each in received] == [[entry_id]] * 2

    loop = asyncio.new_event_loop()
    forgotten = loop.create_task(log.read_blocking({Stream.EVENTS: entry_id}, seconds=10))
    loop.run_until_complete(asyncio.sleep(0.01))
    forgotten.cancel()
    loop.close()
    SyncMemoryEventLog(log).append(b"for no one")


# The plugin


def python(*args, **env):
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=ROOT,
        env={**os.environ, **env},
    )


def pytest_run(*args):
    """Pytest as a user has it: the plugin comes by its entry point."""
    # An editable install that is older than the entry point has it not yet.
    installed = any(entry_point.value == PLUGIN for entry_point in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", PLUGIN]
    options = ["-W", "error", "-p", "no:cacheprovider", *plugin]
    return python("-m", "pytest", *options, "examples/test_my_evaluation.py", *args)


def test_the_entry_point_names_the_plugin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"trinity_events": PLUGIN}


@pytest.mark.processes
def test_loading_the_plugin_imports_nothing_heavy():
    code = f"import pytest, sys; import {PLUGIN}; import json; print(json.dumps(list(sys.modules)))"
    ran = python("-c", code)
    assert ran.returncode == 0, ran.stderr
    loaded = set(json.loads(ran.stdout))
    assert not loaded & {"redis", "anyio", "torch", "ray", "numpy", "asyncio", "rich", "typer"}


@pytest.mark.processes
def test_the_pipeline_needs_no_torch_and_no_ray():
    code = "import sys, trinity_events.testing as t; t.Pipeline(); print(*sys.modules)"
    ran = python("-c", code)
    assert ran.returncode == 0, ran.stderr
    assert not set(ran.stdout.split()) & {"torch", "ray", "numpy", "transformers"}


@pytest.mark.processes
def test_the_example_of_a_users_test_passes():
    ran = pytest_run()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout


@pytest.mark.processes
def test_the_plugin_needs_no_asynchronous_plugin_beside_it():
    ran = pytest_run("-p", "no:asyncio", "-p", "no:anyio", "-c", os.devnull)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_documentation_shows_the_example_as_it_is():
    example = (ROOT / "examples" / "test_my_evaluation.py").read_text()
    assert example in (ROOT / "docs" / "testing.md").read_text()
