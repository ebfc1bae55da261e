"""Follower of a run's announcements: all that an explorer's process reads of the log.

1. A process has one follower, and so one blocking read, however many parts of it listen.
2. Listeners get the announcements that are current when they come, oldest first, and then each new
   one, in the order of the log. A repeated announcement changes nothing, so that a follower may
   begin again from the current ones.
3. Nothing is read of the events: what a thousand explorers report reaches none of them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import TypeAlias

import anyio

from trinity_events.errors import LogLost
from trinity_events.log import RedisEventLog
from trinity_events.server import connect
from trinity_events.subscriptions import Subscription, subscription_on
from trinity_schemas import (
    EpochClosed,
    EpochOpened,
    PublicationStarted,
    StepReady,
    TrainingEnded,
    VersionResent,
)

from ..runtime.background_tasks import background_tasks

logger = logging.getLogger(__name__)

Followed: TypeAlias = (
    EpochOpened | EpochClosed | TrainingEnded | PublicationStarted | StepReady | VersionResent
)
Listener: TypeAlias = Callable[[Followed], Awaitable[None]]


class RunFollower:
    """Follower of one run, which delivers its announcements to the listeners of this process.

    Args:
        log: The run's log, on a connection that sends nothing twice.
    """

    def __init__(self, log: RedisEventLog) -> None:
        self.log = log
        self._current: dict[tuple[type, str], Followed] = {}
        """Newest announcement of each type and kind, the oldest first."""
        self._listeners: list[Listener] = []
        self._order = anyio.Lock()
        self._subscription: Subscription[Followed] | None = None

    async def follow(self) -> None:
        """Follow until cancelled, from the current announcements on.

        A server that is away is waited for. After a failover the current announcements are read
        again: an explorer needs the newest version, not each one.
        """
        while True:
            try:
                await self._follow()
            except LogLost as error:
                logger.warning("run %s is followed anew: %s", self.log.run_id, error)

    async def _follow(self) -> None:
        subscription: Subscription[Followed] = subscription_on(
            lambda: nullcontext(self.log),
            self.log.run_id,
            *(EpochOpened, EpochClosed, TrainingEnded),
            *(PublicationStarted, StepReady, VersionResent),
            start="current",
            group=None,
            deadline=None,
            claim_after=1.0,
        )
        async with subscription as announcements:
            self._subscription = subscription
            async for delivered in announcements:
                await self._deliver(delivered.event)

    def fault(self) -> str:
        """Return the error of the last read as the end of a sentence; empty without one."""
        return "" if self._subscription is None else self._subscription.fault()

    @asynccontextmanager
    async def listening(self, listener: Listener) -> AsyncIterator[None]:
        """Deliver the current announcements, and each new one, to a listener for the block."""
        # An announcement between the current ones and the append would miss this listener.
        async with self._order:
            for announcement in self._current.values():
                await listener(announcement)
            self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    async def _deliver(self, announcement: Followed) -> None:
        async with self._order:
            subject = type(announcement), getattr(announcement, "kind", "")
            # Removed first: a key that is only set again keeps its old place in the order.
            self._current.pop(subject, None)
            self._current[subject] = announcement
            # A copy: a listener may leave while another one is awaited.
            for listener in list(self._listeners):
                await listener(announcement)


@asynccontextmanager
async def followed_run(run_id: str, redis_url: str) -> AsyncIterator[RunFollower]:
    """Yield the follower of a run, which follows it for the block."""
    # No hidden retries: after a fault the cursor checks that the log is the same.
    async with connect(redis_url, retry=False) as client:
        run = RunFollower(RedisEventLog(client, run_id))
        async with background_tasks(run.follow):
            yield run
