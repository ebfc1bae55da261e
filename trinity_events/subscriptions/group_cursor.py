"""Cursor of a consumer group: its start, and its continuation after it was detached."""

from __future__ import annotations

import logging
from typing import Generic, Literal, TypeVar

from msgspec import Struct

from ..core.state import DetachedConsumer
from ..errors import GroupDetached
from ..log import ORIGIN, before, position
from ..replay import SnapshotUnreadable, current_state
from .context import SubscriptionContext
from .cursor import StreamCursor

E = TypeVar("E", bound=Struct)

logger = logging.getLogger(__name__)


class GroupCursor(Generic[E]):
    """Cursor of a consumer group; creates the group, and reports its loss.

    The reducer detaches a group that was idle for too long, so that the log can be trimmed. A
    returning group goes on before the oldest entry that it never acknowledged, or else at its
    last position. If following entries are gone, GroupDetached asks the user for a position.
    """

    def __init__(self, reading: SubscriptionContext[E], group: str, start: str) -> None:
        self._reading = reading
        self._group = group
        self._start = start
        self.last = ORIGIN if start in ("beginning", "current") else start
        """Id of the last entry that this member received."""

    async def create(self) -> None:
        """Create the group unless it exists.

        Raises:
            GroupDetached: if the group was detached and may have missed events.
            LogLost: if entries that follow its start are gone.
        """
        log, stream = self._reading.log, self._reading.stream
        # An existing group continues where it is: `start` counts when it is created.
        if any(info.name == self._group for info in await log.groups(stream)):
            return
        await log.create_group(stream, self._group, await self._beginning())

    async def gone(self) -> GroupDetached:
        """Return the error for a group that the server no longer has."""
        detached = await self._detached()
        if detached is not None and (lost := await self._lost(detached)) is not None:
            return lost
        return GroupDetached(self._run, self._group, "gone", self.last)

    async def _beginning(self) -> str:
        log, stream = self._reading.log, self._reading.stream
        if self._start not in ("beginning", "current"):
            await StreamCursor(log, stream, self._start, asked_for=True).check()
            return self._start
        detached = await self._detached()
        if detached is not None:
            if (lost := await self._lost(detached)) is not None:
                raise lost
            logger.info("group %s of run %s was detached: it goes on", self._group, self._run)
            return _goes_on(detached)
        if self._start == "beginning":
            return ORIGIN
        after, standing = await self._reading.current_announcements()
        last = after[stream]
        matching = [entry for entry in standing if self._reading.filter.deliver(entry) is not None]
        # Just before the oldest current announcement, so that it is delivered too.
        return before(matching[0].id) if matching else last

    async def _detached(self) -> DetachedConsumer | None:
        try:
            state = await current_state(self._reading.log)
        except SnapshotUnreadable:
            return None  # written by a later version, which the reducer reports
        return state.detached.get(f"{self._reading.stream.value}/{self._group}")

    async def _lost(self, detached: DetachedConsumer) -> GroupDetached | None:
        """Return the error for a group that lost unacknowledged entries; None if it lost none."""
        first_retained = await self._reading.log.first_retained_id(self._reading.stream)
        goes_on = _goes_on(detached)
        if first_retained is not None and position(goes_on) < position(before(first_retained)):
            resume = before(first_retained)
            return self._detachment(detached, "trimmed", after=goes_on, resume=resume)
        # The event is of an older version, which did not name the oldest pending entry.
        if detached.pending and detached.oldest_pending is None:
            return self._detachment(detached, "pending", after=detached.position, resume=goes_on)
        return None

    def _detachment(
        self,
        detached: DetachedConsumer,
        fault: Literal["trimmed", "pending"],
        *,
        after: str,
        resume: str,
    ) -> GroupDetached:
        """Return the error for a group that the reducer detached."""
        return GroupDetached(
            self._run,
            self._group,
            fault,
            after=after,
            idle=detached.idle,
            pending=detached.pending,
            resume=resume,
            stream=self._reading.stream.value,
        )

    @property
    def _run(self) -> str:
        return self._reading.filter.run


def _goes_on(detached: DetachedConsumer) -> str:
    """Return the position before the group's first unacknowledged entry, as far as known."""
    return before(detached.oldest_pending) if detached.oldest_pending else detached.position
