"""An explorer whose run ends, or is taken over by a newer epoch, says which of the two it was."""

from contextlib import asynccontextmanager

import pytest

from tests.support.errors import raises
from tests.support.pipeline import reducer_task
from tests.support.waits import PATIENCE
from trinity_events.log import AsyncPublisher, new_producer, open_run
from trinity_schemas import RunClosed
from trinity_workers.explorer.run_follower import followed_run
from trinity_workers.explorer.versions import RunEnded, VersionFollower


@asynccontextmanager
async def following(run_id, redis_url):
    """The versions of the run's first epoch, as an explorer of it follows them."""
    async with reducer_task(redis_url, run_id), followed_run(run_id, redis_url) as run:
        versions = VersionFollower(run, 1)
        async with versions.listening():
            yield versions


async def close(log, epoch, reason):
    publisher = AsyncPublisher(log, epoch, new_producer("launcher"))
    await publisher.publish(RunClosed(reason=reason))


@pytest.mark.usefixtures("publisher")
async def test_an_explorer_whose_run_was_opened_anew_names_the_epoch(client, redis_url, run_id):
    async with following(run_id, redis_url) as versions:
        assert await open_run(client, run_id) == 2
        with raises(RunEnded, run_id=run_id, epoch=1, newest=2):
            await versions.wait(0, deadline=PATIENCE)


@pytest.mark.usefixtures("publisher")
async def test_the_end_of_a_newer_epoch_is_not_taken_for_that_of_ours(
    client, log, redis_url, run_id
):
    epoch = await open_run(client, run_id)
    await close(log, epoch, "interrupted")
    async with following(run_id, redis_url) as versions:
        with raises(RunEnded, run_id=run_id, epoch=1, newest=2):
            await versions.wait(0, deadline=PATIENCE)


@pytest.mark.usefixtures("publisher")
async def test_an_explorer_whose_own_epoch_was_closed_says_how(log, redis_url, run_id):
    await close(log, 1, "interrupted")
    async with following(run_id, redis_url) as versions:
        with raises(RunEnded, newest=None, reason="interrupted"):
            await versions.wait(0, deadline=PATIENCE)
