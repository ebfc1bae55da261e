"""Consumer groups that are gone for ever: after a while the log waits for them no more."""

from __future__ import annotations

import logging

import anyio

from trinity_schemas import ConsumerDetached

from ..log import GroupedLog, GroupInfo, Stream
from .leader import LeadersVoice
from .live import Live

logger = logging.getLogger(__name__)

LOOK = 60.0
"""Seconds between two looks at the groups, at most."""


class Consumers:
    """Detaches groups that asked for nothing for ``idle`` seconds, by an event.

    Silence counts from when we began to lead, at the earliest: before that the server may have
    been down, and nobody could ask it.
    """

    def __init__(self, log: GroupedLog, voice: LeadersVoice, token: int, idle: float) -> None:
        self._log = log
        self._voice = voice
        self._token = token
        self._idle = idle

    async def run(self, live: Live) -> None:
        """Look now and then, until another leads."""
        began = anyio.current_time()
        while True:
            for stream in Stream:
                for found in await self._log.groups(stream):
                    group = found._replace(idle=min(found.idle, anyio.current_time() - began))
                    if group.idle < self._idle:
                        if group.members > 1:
                            await self._log.forget_members(stream, group.name, self._idle)
                    elif not await self._detach(stream, group, live):
                        return
            await anyio.sleep(min(self._idle / 4, LOOK))

    async def _detach(self, stream: Stream, group: GroupInfo, live: Live) -> bool:
        """Say it, then do it: a group is never gone in silence."""
        said = await self._voice.say(
            ConsumerDetached(
                group=group.shown,
                stream=stream.value,
                position=group.last_delivered,
                pending=group.pending,
                idle=group.idle,
                oldest_pending=group.oldest_pending,
            ),
            live.state,
            live.state.epoch,
        )
        if said is None:
            return False
        logger.warning(
            "consumer group %s of the %s of run %s asked for nothing for %d s and is detached, "
            "with %d entries that it never acknowledged: subscribe again to go on from there",
            group.shown,
            stream.value,
            live.state.run_id,
            group.idle,
            group.pending,
        )
        return await self._log.destroy_group(stream, group.name, token=self._token)
