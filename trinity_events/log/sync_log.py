"""The synchronous face of the log, for code that runs in worker threads."""

from __future__ import annotations

from typing import Any

import redis

from trinity_schemas import RunKeys

from .base import Entry, Stream
from .position import ORIGIN
from .redis_log import FIELD, entries


class SyncEventLog:
    """Appends to and reads one run's log. One client serves any number of threads."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self.run_id = run_id
        self.keys = RunKeys.of(run_id)
        self._redis: Any = client

    def append(self, payload: bytes) -> str:
        """Append to the events; returns the entry id."""
        entry_id: bytes = self._redis.xadd(self.keys.events, {FIELD: payload})
        return entry_id.decode()

    def read(
        self, after: str = ORIGIN, *, stream: Stream = Stream.EVENTS, limit: int = 1000
    ) -> list[Entry]:
        """Up to ``limit`` entries after a position."""
        key = self.keys.events if stream is Stream.EVENTS else self.keys.announcements
        return entries(self._redis.xrange(key, min=f"({after}", count=limit))

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()
