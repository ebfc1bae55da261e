"""Messages about the alarms of a run, while it goes on."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from trinity_events.log import RedisEventLog
from trinity_events.replay import current_state
from trinity_events.server import connect
from trinity_events.subscriptions import subscribe
from trinity_schemas import AlarmRaised

from ..config.train_config import RunConfig
from ..runtime.background_tasks import background_tasks
from .notifier import Message, notify

logger = logging.getLogger(__name__)

_CATCH_UP = 5.0
"""Seconds in which the log is read for alarms that the last steps have raised."""


@asynccontextmanager
async def notifying_of_alarms(config: RunConfig) -> AsyncIterator[None]:
    """Send a message about each alarm that is raised in the block, and about the last ones."""
    settings = config.notify
    if "alarm" not in settings.events or not (settings.webhook or settings.command):
        yield
        return
    messages = _AlarmMessages(config)
    async with background_tasks(messages.follow):
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CATCH_UP):
                await messages.catch_up()


class _AlarmMessages:
    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._sent: set[str] = set()
        """Entries of the alarms of which a message was sent."""

    async def follow(self) -> None:
        config = self._config
        try:
            async with subscribe(config.run_id, AlarmRaised, redis_url=config.redis_url) as events:
                async for delivered in events:
                    if delivered.envelope.epoch == config.epoch:
                        await self._send(delivered.entry_id, delivered.event.sentence)
        # Any error: messages never end a run.
        except Exception as error:
            logger.warning("run %s: no further alarm is notified: %s", config.run_id, error)

    async def catch_up(self) -> None:
        """Send messages about raised alarms that the follower has not received."""
        config = self._config
        try:
            async with connect(config.redis_url) as client:
                state = await current_state(RedisEventLog(client, config.run_id))
            if state.epoch == config.epoch:
                for alarm in state.alarms.values():
                    await self._send(alarm.entry_id, alarm.sentence)
        except Exception as error:
            logger.warning("run %s: its last alarms are not notified: %s", config.run_id, error)

    async def _send(self, entry_id: str, sentence: str) -> None:
        if entry_id in self._sent:
            return
        self._sent.add(entry_id)
        run = self._config.run_id
        message = Message(run=run, event="alarm", sentence=f"run {run}: {sentence}", command=None)
        await notify(self._config.notify, message)
