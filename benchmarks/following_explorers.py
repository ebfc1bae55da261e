"""Explorers without an engine: each follows a run as an explorer does, and reports what it hears.

Usage: python -m benchmarks.following_explorers URL RUN FIRST COUNT HOW; ends with standard input.
HOW is `announcements`, as explorers do, or `events`, as they did before there were reports. Each
counts in the hash HEARD how many versions it heard of, and keeps in LATE the milliseconds from a
publication's first event to its being heard.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import redis.asyncio
from msgspec import Struct

from trinity_events.cli.reducer import until_stopped
from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer
from trinity_events.server import connect
from trinity_events.subscriptions import Subscription, subscribe
from trinity_schemas import (
    AppliedPhases,
    PublicationStarted,
    RunClosed,
    RunOpened,
    RunResumed,
    StepReady,
    StepRef,
    TrainerStatusChanged,
    VersionOpened,
    WeightsApplied,
)
from trinity_workers.explorer.run_follower import Followed, followed_run

READY, HEARD, LATE = "bench:ready", "bench:heard", "bench:late"
_PHASES = AppliedPhases(fetch=0.01, pause=0.001)


class _Explorer:
    """Explorer that reports each version as applied once it hears of it."""

    def __init__(self, client: redis.asyncio.Redis, run_id: str, rank: int, how: str) -> None:
        log = RedisEventLog(client, run_id)
        self._client = client
        self._run_id = run_id
        # Before there were reports, an explorer's events went to the events themselves.
        role = "explorer" if how == "announcements" else "old-explorer"
        self._reports = AsyncPublisher(log, 1, new_producer(role, rank))

    async def hear(self, event: Followed | VersionOpened) -> None:
        """Report a version that is ready; note the delay of a publication that starts."""
        if isinstance(event, PublicationStarted | VersionOpened):
            published = await self._client.get(f"{READY}:{event.step}")
            if published is not None:
                await self._client.rpush(LATE, (time.time() - float(published)) * 1000)
        elif isinstance(event, StepReady):
            assert event.version_digest is not None
            await self._reports.publish(
                WeightsApplied(
                    version=StepRef(event.epoch, event.step),
                    digest=event.version_digest,
                    bytes=1 << 30,
                    verified_at=time.time(),
                    phases=_PHASES,
                )
            )
            await self._client.hincrby(HEARD, str(event.step), 1)


@asynccontextmanager
async def following(url: str, run_id: str, explorer: _Explorer, how: str) -> AsyncIterator[None]:
    """Let an explorer hear of the run for the block."""
    if how == "announcements":
        async with followed_run(run_id, url) as run, run.listening(explorer.hear):
            yield
        return
    opening = (RunOpened, RunResumed, RunClosed, TrainerStatusChanged)

    async def follow(types: tuple[type[Struct], ...], start: str) -> None:
        subscription: Subscription[Any] = subscribe(run_id, *types, redis_url=url, start=start)
        async with subscription as events:
            async for delivered in events:
                await explorer.hear(delivered.event)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow, opening, "beginning")
        tasks.start_soon(follow, (VersionOpened,), "current")
        tasks.start_soon(follow, (StepReady,), "current")
        yield
        tasks.cancel_scope.cancel()


async def explore(url: str, run_id: str, first: str, count: str, how: str) -> None:
    """Follow a run with some explorers until the process is stopped."""
    async with connect(url) as client, anyio.create_task_group() as tasks:

        async def one_explorer(rank: int) -> None:
            explorer = _Explorer(client, run_id, rank, how)
            async with following(url, run_id, explorer, how):
                await client.hincrby(HEARD, "following", 1)
                await anyio.sleep_forever()

        for rank in range(int(first), int(first) + int(count)):
            tasks.start_soon(one_explorer, rank)


if __name__ == "__main__":
    url, run_id, first, count, how = sys.argv[1:]
    anyio.run(until_stopped, lambda: explore(url, run_id, first, count, how), True)
