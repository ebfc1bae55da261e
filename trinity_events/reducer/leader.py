"""Leader election of a run: one reducer leads, and another takes over within one lease.

1. The fencing token protects the log, not the lease: the log refuses all but the newest token.
2. A leader that dies may be replaced after one lease.
3. None of the leader's own events is sent twice.
"""

from __future__ import annotations

import time

import anyio

from trinity_schemas import Envelope, Event, encode

from ..core import MonitorState
from ..log import EventLog, RedisEventLog, new_producer
from ..system.host import get_host_id
from .policy import ReducerTimeouts


class Leader:
    """Leader lease of one run, with its fencing token."""

    def __init__(self, log: RedisEventLog, timeouts: ReducerTimeouts = ReducerTimeouts()) -> None:
        self._log = log
        self._lease = timeouts.leader_lease
        self.token = 0

    async def acquire(self) -> int:
        """Wait until this reducer leads; return its fencing token."""
        while True:
            self.token, delay = await self._log.lead(self._lease)
            if self.token:
                return self.token
            # The rest of the other leader's lease: the server sends nothing when a key lapses.
            await anyio.sleep(delay)

    async def renew_until_lost(self) -> None:
        """Renew the lease until it is lost, then return."""
        while True:
            # Three renewals in a lease: one that comes late by half a lease is still in time.
            await anyio.sleep(self._lease / 3)
            if not await self._log.renew(self.token, self._lease):
                return

    async def release(self) -> None:
        """Release the lease, so that another reducer can lead at once."""
        await self._log.renew(self.token, 0)


class LeaderPublisher:
    """Publisher of the leader's own events; the log refuses them once another reducer leads.

    Each lead is a new producer, whose sequence begins at 1. After a lost reply the leader gives
    up the lease instead of sending an event twice.
    """

    def __init__(self, log: EventLog, token: int) -> None:
        self._log = log
        self._token = token
        self._producer = new_producer("reducer")
        self._sequence = 0
        self._order = anyio.Lock()

    async def publish(self, event: Event, state: MonitorState, epoch: int) -> str | None:
        """Append the event in an epoch; return its entry id, or None if another reducer leads."""
        # Several tasks publish here. A number that overtook a lower one would make the fold drop
        # the lower one as a duplicate.
        async with self._order:
            self._sequence += 1
            envelope = Envelope(
                run_id=state.run_id,
                epoch=epoch,
                producer=self._producer,
                sequence=self._sequence,
                occurred_at=time.time(),
                event=event,
                host_id=get_host_id() if self._sequence == 1 else None,
            )
            return await self._log.append_leading(self._token, encode(envelope))
