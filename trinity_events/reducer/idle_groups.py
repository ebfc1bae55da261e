"""Detach of idle consumer groups, so that the log can be trimmed."""

from __future__ import annotations

import logging

import anyio

from trinity_schemas import ConsumerDetached

from ..log import GroupedLog, GroupInfo, Stream
from .leader import LeaderPublisher
from .live_state import LiveState

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 60.0
"""Longest pause between two checks of the groups, in seconds."""


class IdleGroups:
    """Task of the leader that detaches groups which are behind and idle for ``idle`` seconds.

    A group that has acknowledged every entry does not keep the log from being trimmed, and stays.
    Its members may wait in a blocking read, which Redis 7.0 does not report. The idle time of any
    other group counts from when this leader first saw it behind. Before that, the server may
    have been down, so that no member could read.
    """

    def __init__(
        self, log: GroupedLog, publisher: LeaderPublisher, token: int, idle: float
    ) -> None:
        self._log = log
        self._publisher = publisher
        self._token = token
        self._idle = idle

    async def run(self, live: LiveState) -> None:
        """Check the groups periodically, until another reducer leads."""
        behind_since: dict[tuple[Stream, str], float] = {}
        while True:
            groups = [
                (stream, group) for stream in Stream for group in await self._log.groups(stream)
            ]
            now = anyio.current_time()
            behind_since = {
                (stream, group.name): behind_since.get((stream, group.name), now)
                for stream, group in groups
                if not group.caught_up
            }
            for stream, group in groups:
                # A group that is caught up is not in the mapping: its silence is 0, and it is never
                # detached.
                silent = min(group.idle, now - behind_since.get((stream, group.name), now))
                if silent < self._idle:
                    # The member that read last stays in any case, so a single one needs no request.
                    if group.members > 1:
                        await self._log.forget_members(stream, group.name, self._idle)
                elif not await self._detach(stream, group._replace(idle=silent), live):
                    return
            # A quarter: a group is detached at most a quarter of its idle time late.
            await anyio.sleep(min(self._idle / 4, LONGEST_PAUSE))

    async def _detach(self, stream: Stream, group: GroupInfo, live: LiveState) -> bool:
        """Publish the event, then destroy the group: no group disappears without an event."""
        entry_id = await self._publisher.publish(
            ConsumerDetached(
                group=group.printable_name,
                stream=stream.value,
                position=group.last_delivered,
                pending=group.pending,
                idle=group.idle,
                oldest_pending=group.oldest_pending,
            ),
            live.state,
            live.state.epoch,
        )
        if entry_id is None:
            return False
        logger.warning(
            "consumer group %s of the %s of run %s read nothing for %d s and is detached, "
            "with %d entries that it never acknowledged: subscribe again to go on from there",
            group.printable_name,
            stream.value,
            live.state.run_id,
            group.idle,
            group.pending,
        )
        # A leader that dies before this leaves the group, and the next one publishes the event
        # again.
        return await self._log.destroy_group(stream, group.name, token=self._token)
