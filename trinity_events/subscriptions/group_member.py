"""Member of a consumer group, which receives a share of the events.

1. A member has one entry at a time. The others of its group receive the rest.
2. An entry that its member does not acknowledge is delivered again, to this or another member.
3. An entry that was delivered too often becomes a dead letter, and the group continues.
4. An entry that the filter leaves out is acknowledged, so that it holds up no trimming.
5. A group that may have missed entries gets an error with its last position, never a silent gap.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

import anyio
import redis
from msgspec import Struct

from ..log import Entry
from ..server import Deadline
from .context import SubscriptionContext
from .delivered import Delivered
from .group_cursor import GroupCursor

E = TypeVar("E", bound=Struct)

CLAIM_AFTER = 60.0
"""Seconds after which another member takes over a pending event."""
MAX_DELIVERIES = 5
"""Number of deliveries after which an unacknowledged event becomes a dead letter."""

logger = logging.getLogger(__name__)


class GroupSettings(NamedTuple):
    """Name, start and delivery limits of a consumer group."""

    name: str
    start: str
    claim_after: float = CLAIM_AFTER
    max_deliveries: int = MAX_DELIVERIES


async def consume_group(
    reading: SubscriptionContext[E], group: GroupSettings
) -> AsyncIterator[Delivered[E]]:
    """Yield the events that the group gives to a new member.

    Raises:
        GroupDetached: if the group is gone, and may have missed events.
        LogLost: if entries that follow its start are gone.
        DeadlineExceeded: if no event came in time.
    """
    reading.wait.renew()
    member = _Member(reading, group)
    await member.join()
    while True:
        entry = await member.next()
        delivered = reading.filter.deliver(entry, member.acknowledge(entry.id))
        if delivered is None:
            await member.acknowledge(entry.id)()
            continue
        yield delivered
        reading.wait.renew()


class _Member(Generic[E]):
    """Member of a group; another member would take over entries that wait in a page here."""

    def __init__(self, reading: SubscriptionContext[E], group: GroupSettings) -> None:
        self._reading = reading
        self._group = group
        self._name = f"member-{secrets.token_hex(4)}"
        self._place = GroupCursor(reading, group.name, group.start)
        # Both are due at once: members that died before may have left entries pending.
        self._claim_at = self._forget_at = anyio.current_time()

    async def join(self) -> None:
        await self._reading.wait.retry(self._place.create)

    async def next(self) -> Entry:
        """Return the next entry for this member."""
        while True:
            try:
                entries = await self._reading.wait.retry(self._read_or_claim)
            except redis.ResponseError as error:
                # The reducer detached the group, or the server lost its data.
                if not str(error).startswith("NOGROUP"):
                    raise
                raise await self._reading.wait.retry(self._place.gone) from None
            if entries:
                self._place.last = entries[0].id
                return entries[0]

    async def _read_or_claim(self) -> list[Entry]:
        now = anyio.current_time()
        if now >= self._forget_at:
            await self._forget()
            self._forget_at = now + self._reading.timeouts.forget_after
        if now >= self._claim_at:
            if claimed := await self._claim():
                return claimed
            # Not with every read: a takeover is delayed by half of claim_after at most.
            self._claim_at = now + self._group.claim_after / 2
        return await self._reading.log.read_group(
            self._reading.stream,
            self._group.name,
            self._name,
            # The read ends when the next takeover is due.
            seconds=min(self._reading.block(), max(0.0, self._claim_at - now)),
            # A second one would wait here, and no other member could take it before `claim_after`
            # (1).
            limit=1,
        )

    async def _claim(self) -> list[Entry]:
        """Take over entries that stayed pending; give up those that were delivered too often."""
        while True:
            claimed = await self._reading.log.claim(
                self._reading.stream,
                self._group.name,
                self._name,
                idle=self._group.claim_after,
                most=self._group.max_deliveries,
                limit=1,
            )
            for entry in claimed.dead:
                logger.error(
                    "%s of run %s was given to group %s %d times and never acknowledged: "
                    "it is a dead letter now",
                    entry.id,
                    self._reading.filter.run,
                    self._group.name,
                    self._group.max_deliveries,
                )
            # After a page of dead letters alone, more may be pending behind them.
            if claimed.entries or not claimed.dead:
                return claimed.entries

    async def _forget(self) -> None:
        reading = self._reading
        await reading.log.forget_members(
            reading.stream, self._group.name, reading.timeouts.forget_after
        )

    def acknowledge(self, entry_id: str) -> Callable[[], Awaitable[None]]:
        """Return a function that acknowledges the entry, and waits for a server that is away."""
        reading, group = self._reading, self._group.name

        async def ack() -> None:
            missing = f"{entry_id} of run {reading.filter.run} was not acknowledged to {group}"
            await Deadline(reading.deadline, missing).retry(
                lambda: reading.log.ack(reading.stream, group, entry_id)
            )

        return ack
