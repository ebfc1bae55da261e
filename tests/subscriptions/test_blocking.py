"""Blocking twins: subscriptions, leases and waits in plain code and inside of a running loop."""

import re
from functools import partial
from inspect import signature

import anyio
import anyio.to_thread
import pytest

import trinity_events
from tests.support.errors import raises
from tests.support.event_histories import committed, opened, part, started
from tests.support.pipeline import reducer_task
from tests.support.waits import PATIENCE
from trinity_events import blocking, newest_checkpoint, publishing, training_run, wait_ready
from trinity_events.coordinator import CheckpointCoordinator, staged_path
from trinity_events.errors import (
    CheckpointHeld,
    DeadlineExceeded,
    RunNotFound,
    StepNotReady,
)
from trinity_events.subscriptions.subscription import SubscriptionNotOpen
from trinity_schemas import SaveStarted, StepReady


async def in_thread(function, *args, **options):
    with anyio.fail_after(2 * PATIENCE):
        return await anyio.to_thread.run_sync(partial(function, *args, **options))


async def publish_weights(publisher, step):
    for event in (opened(step), part(step), committed(step, "weights")):
        await publisher.publish(event)


async def test_a_plain_loop_reads_events_inside_of_a_running_loop_too(publisher, run_id, redis_url):
    for step in (1, 2):
        await publisher.publish(started(step))
    options = {"start": "beginning", "deadline": PATIENCE, "redis_url": redis_url}
    with blocking.subscribe(run_id, SaveStarted, **options) as events:
        assert [next(events).slot.step for _ in range(2)] == [1, 2]


async def test_a_group_acknowledges(publisher, log, run_id, redis_url):
    await publisher.publish(started(1))
    options = {"start": "beginning", "deadline": PATIENCE, "redis_url": redis_url, "group": "g"}
    with blocking.subscribe(run_id, SaveStarted, **options) as events:
        events.ack(next(events))
    again = blocking.subscribe(run_id, SaveStarted, **{**options, "deadline": 0.2})
    with again as events, pytest.raises(DeadlineExceeded):
        next(events)


def test_a_subscription_that_is_not_open_says_how_it_is_read():
    with raises(SubscriptionNotOpen, keyword="with"):
        next(blocking.subscribe("run", StepReady))


async def test_a_wait_that_is_interrupted_leaves_the_block(publisher, run_id, redis_url):
    with blocking.subscribe(run_id, SaveStarted, redis_url=redis_url) as events:
        future = events._running.start_task_soon(events._next)
        future.cancel()  # as __next__ does when Ctrl-C interrupts it


async def test_a_step_that_is_ready_or_becomes_ready_is_returned(
    publisher, run_id, redis_url, tmp_path
):
    async with reducer_task(redis_url, run_id, tmp_path):
        await publish_weights(publisher, 1)
        ready = await wait_ready(run_id, 1, deadline=PATIENCE, redis_url=redis_url)
        assert (ready.step, ready.kind, ready.epoch) == (1, "weights", 1)
        await publish_weights(publisher, 2)
        await wait_ready(run_id, 2, deadline=PATIENCE, redis_url=redis_url)
        older = await in_thread(
            blocking.wait_ready, run_id, 1, epoch=1, deadline=PATIENCE, redis_url=redis_url
        )
        assert older == ready
        with raises(DeadlineExceeded, missing=re.compile("of step 1 "), deadline=0.2):
            await wait_ready(run_id, 1, epoch=7, deadline=0.2, redis_url=redis_url)


async def test_a_wait_that_is_over_says_what_the_step_lacks(publisher, run_id, redis_url):
    await publisher.publish(opened(1))
    with raises(DeadlineExceeded, deadline=0.5, reason=re.compile("weights")):
        await wait_ready(run_id, 1, deadline=0.5, redis_url=redis_url)


async def test_a_step_whose_place_was_taken_is_told_at_once(publisher, run_id, redis_url, tmp_path):
    async with reducer_task(redis_url, run_id, tmp_path):
        await publisher.publish(opened(1))
        await publish_weights(publisher, 2)
        await publisher.publish(part(1))
        await publisher.publish(committed(1, "weights"))
        with raises(StepNotReady, run_id=run_id, step=1, superseded_by=2):
            await wait_ready(run_id, 1, deadline=PATIENCE, redis_url=redis_url)


async def test_a_run_that_is_not_there_is_named(run_id, redis_url):
    with raises(RunNotFound, run_id=run_id, fault="absent"):
        await in_thread(blocking.wait_ready, run_id, 1, deadline=PATIENCE, redis_url=redis_url)


async def test_the_newest_checkpoint_is_found_and_held(run_id, redis_url, tmp_path):
    def save(epoch):
        with publishing(run_id, epoch, "actor", redis_url=redis_url) as publisher:
            saves = CheckpointCoordinator(publisher, tmp_path / run_id)
            for step in (1, 2):
                path = staged_path(tmp_path / run_id, epoch, step) / "model.pt"
                path.parent.mkdir(parents=True)
                saves.save_sync(partial(path.write_bytes, b"weights"), step, path=path)
                saves.register_and_monitor_blocking(step, checkpoint_thread_count=1)
            saves.wait_all(PATIENCE)

    here = {"redis_url": redis_url, "checkpoint_root": tmp_path}
    with training_run(run_id, redis_url=redis_url) as run:
        assert await newest_checkpoint(run_id, **here) is None
        async with reducer_task(redis_url, run_id, tmp_path):
            await in_thread(save, run.epoch)
            await wait_ready(run_id, 2, "checkpoint", deadline=PATIENCE, redis_url=redis_url)
            newest = await in_thread(blocking.newest_checkpoint, run_id, **here)
            assert newest == (1, 2, tmp_path / run_id / "global_step_2")
            with anyio.fail_after(PATIENCE):
                while not newest.folder.exists():
                    await anyio.sleep(0.01)
            assert await in_thread(read_held_model, run_id, newest.step, here) == b"weights"
    with raises(CheckpointHeld, run_id=run_id, step=7, fault="absent"):
        await in_thread(read_held_model, run_id, 7, here)


def read_held_model(run_id, step, here):
    with blocking.hold_checkpoint(run_id, step, **here) as folder:
        return (folder / "model.pt").read_bytes()


@pytest.mark.parametrize(
    ("twin", "asynchronous"),
    [
        (blocking.hold_checkpoint, trinity_events.hold_checkpoint),
        (blocking.wait_ready, trinity_events.wait_ready),
        (blocking.newest_checkpoint, trinity_events.newest_checkpoint),
    ],
    ids=lambda function: function.__name__,
)
def test_a_twin_takes_what_the_asynchronous_call_takes(twin, asynchronous):
    assert signature(twin).parameters == signature(asynchronous).parameters
