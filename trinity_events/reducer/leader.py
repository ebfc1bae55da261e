"""The lead of a run: one reducer at a time, another within one lease when it dies."""

from __future__ import annotations

import time

import anyio

from trinity_schemas import Envelope, Event, encode

from ..core import MonitorState
from ..log import EventLog, RedisEventLog, new_producer

LEASE = 3.0
"""Seconds after which the lead of a reducer that is silent may be taken."""


class Leader:
    """Takes and keeps the lead of one run. The token, not the lease, is what protects the log."""

    def __init__(self, log: RedisEventLog, lease: float = LEASE) -> None:
        self._log = log
        self._lease = lease
        self.token = 0

    async def take(self) -> int:
        """Wait until the lead is ours; returns the fencing token."""
        while True:
            self.token, left = await self._log.lead(self._lease)
            if self.token:
                return self.token
            await anyio.sleep(left)

    async def keep(self) -> None:
        """Renew until the lead is lost, then return."""
        while True:
            await anyio.sleep(self._lease / 3)
            if not await self._log.renew(self.token, self._lease):
                return

    async def give_up(self) -> None:
        """Let another lead at once."""
        await self._log.renew(self.token, 0)


class LeaderPublisher:
    """Publishes the leader's own events: time that passed. Refused once another leads.

    Each lead speaks as a producer of its own, whose sequences begin at 1; after a reply that was
    lost the lead is given up, so that none is sent twice.
    """

    def __init__(self, log: EventLog, token: int) -> None:
        self._log = log
        self._token = token
        self._producer = new_producer("reducer")
        self._sequence = 0
        self._order = anyio.Lock()

    async def publish(self, event: Event, state: MonitorState, epoch: int) -> str | None:
        """Append the event in the epoch that it is of: its entry id, or None if another leads."""
        async with self._order:
            self._sequence += 1
            envelope = Envelope(
                run_id=state.run_id,
                epoch=epoch,
                producer=self._producer,
                sequence=self._sequence,
                occurred_at=time.time(),
                event=event,
            )
            return await self._log.append_leading(self._token, encode(envelope))
