"""The lead of a run: one reducer at a time, another within one lease when it dies."""

from __future__ import annotations

import anyio

from ..log import RedisEventLog

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
