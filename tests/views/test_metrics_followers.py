"""Runs that have metrics: open ones and those that were closed lately, within a bound."""

from contextlib import asynccontextmanager

import anyio
import pytest

from tests.support.dashboards import put_run
from tests.support.redis_servers import servers
from tests.support.waits import until
from trinity_events.log import AsyncPublisher, Entry, RedisEventLog, new_producer, open_run
from trinity_events.server import connect
from trinity_events.views import metrics_followers
from trinity_events.views.metrics import ServerMetrics
from trinity_events.views.metrics_followers import FollowerLimits, RunFollowers
from trinity_schemas import RunClosed

pytestmark = pytest.mark.server


@pytest.fixture
async def own(tmp_path):
    """A client of a server of the test's own."""
    with servers(tmp_path, 1) as [server]:
        async with connect(server.url) as client:
            yield client


@asynccontextmanager
async def followed(client, **limits):
    """Follow the runs of a server, whose index is looked at often."""
    metrics = ServerMetrics()
    limits = FollowerLimits(look_every=0.05, recheck_every=0.1, **limits)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(RunFollowers(client, metrics, None, limits).run)
        yield metrics
        tasks.cancel_scope.cancel()


def served(metrics, *run_ids):
    return lambda: set(metrics.runs) == set(run_ids)


async def close(client, run):
    log = RedisEventLog(client, run)
    publisher = AsyncPublisher(log, await log.newest_epoch(), new_producer("trainer"))
    await publisher.publish(RunClosed(reason="finished"))


def left_out(metrics):
    return metrics.registry.get_sample_value("trinity_runs_left_out")


async def test_the_newest_runs_are_served_and_the_others_counted(own):
    for run in ("a", "b", "c"):
        await open_run(own, run)
    async with followed(own, runs=2, closed_for=0.0) as metrics:
        await until(served(metrics, "b", "c"))
        await until(lambda: left_out(metrics) == 1)
        await close(own, "b")
        await until(served(metrics, "a", "c"))
        await until(lambda: left_out(metrics) == 0)
        await open_run(own, "b")
        await until(served(metrics, "b", "c"))


async def test_an_open_run_goes_before_later_ones_that_are_closed(own):
    for run in ("a", "b", "c"):
        await open_run(own, run)
        if run != "a":
            await close(own, run)
    async with followed(own, runs=2) as metrics:
        await until(served(metrics, "a", "c"))
        assert left_out(metrics) == 0


async def test_a_closed_run_stays_for_a_while(own):
    await open_run(own, "a")
    await close(own, "a")
    async with followed(own) as metrics:
        await until(served(metrics, "a"))
        await until(lambda: metrics.registry.get_sample_value("trinity_open", {"run": "a"}) == 0)
    async with followed(own, closed_for=0.0) as metrics:
        await open_run(own, "b")
        await until(served(metrics, "b"))
        await close(own, "b")
        await until(served(metrics))


async def test_a_run_that_was_left_open_days_ago_has_no_place(own):
    await put_run(own, "old", [Entry("1000-0", b"any")])
    await open_run(own, "new")
    async with followed(own) as metrics:
        await until(served(metrics, "new"))
        assert left_out(metrics) == 0


async def test_a_run_whose_follower_fails_does_not_end_the_others(own, monkeypatch):
    follow = metrics_followers.follow_state

    async def follow_or_fail(log):
        if log.run_id == "a":
            raise RuntimeError("it cannot be followed")
        async for envelope in follow(log):
            yield envelope

    monkeypatch.setattr(metrics_followers, "follow_state", follow_or_fail)
    for run in ("a", "b"):
        await open_run(own, run)
    async with followed(own) as metrics:

        def readable(run):
            return metrics.registry.get_sample_value("trinity_run_readable", {"run": run})

        await until(lambda: (readable("a"), readable("b")) == (0, 1))
