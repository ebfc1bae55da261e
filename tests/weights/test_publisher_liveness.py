"""Ranks that publish weights are known to be at it, and missed when they die."""

import time
from contextlib import closing

import anyio
import pytest
import torch

from tests.support.event_histories import History, committed, failed, opened, part, slot
from tests.support.pipeline import announced, reducer_task
from tests.support.transport_processes import actor, kill
from trinity_events import Synchronizer
from trinity_events.analysis.explain import explain
from trinity_events.core import expired, lease_holders
from trinity_schemas import (
    SaveFailed,
    SaveStarted,
    StepFailed,
    StepReady,
    VersionPartPublished,
)

LEASE = 0.5


def begun(step, save_id, rank):
    at = slot(step, kind="weights", rank=rank, name="part")
    return SaveStarted(save_id=save_id, slot=at, lease=LEASE)


def by_rank(history, step, *ranks):
    history.add(opened(step, *ranks))
    for rank in ranks:
        history.add(begun(step, f"a{rank}", rank), rank=rank)


def published(step, rank):
    whole = part(step, rank)
    return VersionPartPublished(
        step=step,
        rank=rank,
        manifest_digest=whole.manifest_digest,
        bytes=8,
        tensors=1,
        chunks=1,
        save_id=f"a{rank}",
    )


def test_a_rank_that_falls_silent_while_it_publishes_fails_its_version():
    history = History()
    by_rank(history, 1, 0, 1)
    history.add(published(1, 0))
    state = history.fold()[0].state
    assert list(lease_holders(state)) == ["trainer-1"]
    for event in expired(state, {"trainer-0", "trainer-1"}):
        history.add(event, by="reducer")
    monitor, announcements = history.fold()
    [failure] = [event for event in announcements if isinstance(event, StepFailed)]
    assert (failure.kind, failure.step) == ("weights", 1)
    assert failure.reason.startswith("part of actor-1 for weights step 1 failed: nothing was heard")
    assert not monitor.state.attempts


def test_a_version_is_ready_whether_or_not_its_ranks_said_that_they_began():
    history = History()
    by_rank(history, 1, 0)
    history.add(published(1, 0))
    history.add(opened(2))
    history.add(part(2))
    history.add(committed(1, "weights"))
    history.add(committed(2, "weights"))
    monitor, announcements = history.fold()
    assert [event.step for event in announcements if isinstance(event, StepReady)] == [1, 2]
    assert not monitor.state.attempts


def test_a_rank_that_follows_anothers_failure_is_not_the_reason_of_it():
    history = History()
    by_rank(history, 1, 0, 1)
    followed = failed(1, "a0", kind="weights", name="part")
    history.add(
        SaveFailed(
            save_id="a0", slot=followed.slot, error_type="PeerFailed", message="", followed=True
        )
    )
    history.add(failed(1, "a1", kind="weights", rank=1, name="part"), rank=1)
    monitor, announcements = history.fold()
    [failure] = [event for event in announcements if isinstance(event, StepFailed)]
    assert failure.reason == "part of actor-1 for weights step 1 failed: OSError: disk full"
    assert not monitor.state.attempts


def test_a_rank_that_begins_once_its_version_is_ready_is_not_waited_for():
    history = History()
    history.add(opened(1))
    history.add(part(1))
    history.add(committed(1, "weights"))
    history.add(begun(1, "late", 0))
    assert not lease_holders(history.fold()[0].state)


def test_explain_tells_which_ranks_are_at_it():
    history = History()
    by_rank(history, 1, *range(12))
    history.add(published(1, 0))
    explanation = explain(history.fold()[0].state, 1, now=int(1e3) + 2500)
    assert "; rank 1, 2, 3, 4, 5, 6, 7, 8 and 3 more at it for 2.5 s" in explanation


@pytest.fixture
def trainer(publisher, redis_url, run_id):
    made = Synchronizer(run_id, publisher.epoch, redis_url=redis_url, lease=LEASE)
    with closing(made):
        yield made


TENSORS = [("a", torch.rand(4))]


async def test_a_rank_that_takes_longer_than_its_lease_is_waited_for(
    trainer, log, redis_url, run_id
):
    """Invariant 5 of publication.py."""
    async with reducer_task(redis_url, run_id):
        trainer.open_version(1)
        part = trainer.publication(1)
        part.begin()
        trainer.commit(1)
        await anyio.sleep(3 * LEASE)
        part.add(*TENSORS[0])
        part.publish()
        [announcement] = await announced(log, 1)
    assert isinstance(announcement, StepReady)


def publishes_for_ever(pipe, url, run_id, epoch):
    made = Synchronizer(run_id, epoch, redis_url=url, rank=1, lease=LEASE)
    made.publication(1, 1).add(*TENSORS[0])
    made.flush()
    pipe.send(None)
    time.sleep(600)


@pytest.mark.processes
async def test_a_rank_that_is_killed_while_it_publishes_is_missed_within_its_lease(
    trainer, log, redis_url, run_id
):
    async with reducer_task(redis_url, run_id):
        trainer.open_version(1, ranks=(0, 1))
        with actor(publishes_for_ever, redis_url, run_id, trainer.epoch) as (process, _):
            trainer.publish(TENSORS, 1)
            trainer.commit(1)
            trainer.flush()
            await anyio.sleep(3 * LEASE)
            assert not await announced(log, 0), "while it lives it is waited for"
            kill(process)
            [announcement] = await announced(log, 1)
    assert isinstance(announcement, StepFailed)
    assert announcement.reason.startswith(
        "part of trainer-1 for weights step 1 failed: nothing was heard"
    )
