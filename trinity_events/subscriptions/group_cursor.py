"""Where a consumer group begins, goes on, or was lost."""

from __future__ import annotations

import logging
from typing import Generic, TypeVar

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
    """Creates the group, and says so when it is gone.

    A group that was idle for too long is detached by the reducer: the log is trimmed without it.
    When it comes back it goes on before the oldest entry that it never acknowledged, or else
    where it was, if all that follows is still there. If it is not, its user is told, and chooses a
    position to go on from.
    """

    def __init__(self, reading: SubscriptionContext[E], group: str, start: str) -> None:
        self._reading = reading
        self._group = group
        self._start = start
        self.last = ORIGIN if start in ("beginning", "current") else start
        """What this member was given last."""

    async def create(self) -> None:
        """Create the group if it is not there.

        Raises:
            GroupDetached: when it was, and may have missed events meanwhile.
            LogLost: when what follows the position to begin from is gone.
        """
        log, stream = self._reading.log, self._reading.stream
        if any(one.name == self._group for one in await log.groups(stream)):
            return
        await log.create_group(stream, self._group, await self._beginning())

    async def gone(self) -> GroupDetached:
        """What to raise when the server does not know the group any more."""
        detached = await self._detached()
        if detached is not None and (lost := await self._lost(detached)) is not None:
            return lost
        return GroupDetached(
            f"consumer group {self._group} of run {self._run} is no longer on the server, and "
            f"may miss what came after {self.last}: it was idle for too long, someone destroyed "
            "it, or the server lost its data; subscribe again, which goes on where it can"
        )

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
        wanted = [entry for entry in standing if self._reading.filter.deliver(entry) is not None]
        # Just before the oldest of what stands, so that it is delivered too.
        return before(wanted[0].id) if wanted else last

    async def _detached(self) -> DetachedConsumer | None:
        try:
            state = await current_state(self._reading.log)
        except SnapshotUnreadable:
            return None  # of a later version: its users are told by the reducer
        return state.detached.get(f"{self._reading.stream.value}/{self._group}")

    async def _lost(self, detached: DetachedConsumer) -> GroupDetached | None:
        """What to raise where the group cannot go on with all that it has not dealt with."""
        left = await self._reading.log.first_retained_id(self._reading.stream)
        goes_on = _goes_on(detached)
        if left is not None and position(goes_on) < position(before(left)):
            return self._detached_with(
                detached,
                f"and has lost the {self._reading.stream.value} after {goes_on} that are no longer "
                f"on the server: read them with: trinity-events replay {self._run}, or export; and "
                f'subscribe with start="{before(left)}" to go on with what is left',
            )
        if detached.pending and detached.oldest_pending is None:
            return self._detached_with(
                detached,
                f'at or before {detached.position}: subscribe with start="{goes_on}" to go on '
                "without them, or from an earlier position to be given them again",
            )
        return None

    def _detached_with(self, detached: DetachedConsumer, then: str) -> GroupDetached:
        pending = f"with {detached.pending} entries that it never acknowledged " * bool(
            detached.pending
        )
        return GroupDetached(
            f"consumer group {self._group} of run {self._run} was detached after "
            f"{detached.idle:g} s without a member, {pending}{then}"
        )

    @property
    def _run(self) -> str:
        return self._reading.filter.run


def _goes_on(detached: DetachedConsumer) -> str:
    """The position after which is all that the group has not dealt with, as far as is known."""
    return before(detached.oldest_pending) if detached.oldest_pending else detached.position
