"""Synchronous client of the log, for code that runs in worker threads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis

from trinity_schemas import RunKeys, grant_key, heartbeat_key

from ..base import Entry, Stream
from ..position import LAST_ID, ORIGIN
from ..reducer_root import select_leader_folder
from .key_errors import exhausted, is_exhausted, parse_number, wrong_type
from .replies import FIELD, entries
from .scripts import Scripts

_LONGEST_WAIT = 3.0
"""Seconds that one request waits on the server, at most; below the socket's deadline."""


class SyncEventLog:
    """Appends to and reads one run's log. One client serves any number of threads.

    Methods raise the client's errors; :mod:`trinity_events.log.retry` tells which are transient.
    They raise KeyConflict for a key of the run that another program wrote.
    """

    remote = True
    """True if an append may block or fail, so that another thread does it."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self.run_id = run_id
        self.keys = RunKeys.of(run_id)
        self._redis: Any = client
        self._run = Scripts(client)
        self._closed = False

    def append(self, payload: bytes) -> str:
        """Append an event; return its entry id."""
        with self._naming(self.keys.events):
            entry_id: bytes = self._redis.xadd(self.keys.events, {FIELD: payload})
        return entry_id.decode()

    def append_many(self, payloads: Sequence[bytes]) -> list[str]:
        """Append events in this order, all or none; return their entry ids."""
        return self._append_many(self.keys.events, payloads)

    def append_reports(self, payloads: Sequence[bytes]) -> list[str]:
        """Append reports in this order, all or none; return their entry ids."""
        return self._append_many(self.keys.reports, payloads)

    def _append_many(self, key: str, payloads: Sequence[bytes]) -> list[str]:
        if not payloads:
            return []
        with self._used(), self._naming(key):
            ids = self._run("append_many", keys=[key], args=payloads)
        return [entry_id.decode() for entry_id in ids]

    def read(
        self, after: str = ORIGIN, *, stream: Stream = Stream.EVENTS, limit: int = 1000
    ) -> list[Entry]:
        """Return up to ``limit`` entries after a position."""
        if after == LAST_ID:  # a server answers this with an error
            return []
        key = self.keys.events if stream is Stream.EVENTS else self.keys.announcements
        return entries(self._redis.xrange(key, min=f"({after}", count=limit))

    def renew_heartbeat(self, incarnation: str, lease: float) -> None:
        """Renew a process's heartbeat for ``lease`` seconds."""
        key = heartbeat_key(self.run_id, incarnation)
        with self._used() as client:
            client.set(key, b"", px=max(1, int(lease * 1000)))

    def clear_heartbeat(self, incarnation: str) -> None:
        """End a process's heartbeat, once it has no running save that could fail."""
        with self._used() as client:
            client.delete(heartbeat_key(self.run_id, incarnation))

    def granted(self, save_id: str, seconds: float) -> bool:
        """Wait until a save is granted its turn; return False if it is not in time.

        A worker that lost the first reply can read the grant again.
        """
        until = time.monotonic() + seconds
        while True:
            # In pieces below the deadline of a socket: the client would take a longer one for a
            # fault.
            remaining = max(0.001, min(_LONGEST_WAIT, until - time.monotonic()))
            waited = max(1, int(remaining * 1000))
            with self._used() as client:
                if client.xread({grant_key(self.run_id, save_id): ORIGIN}, count=1, block=waited):
                    return True
            if time.monotonic() >= until:
                return False

    def epoch(self) -> int:
        """Return the run's newest epoch; 0 if none was opened."""
        return parse_number(self.keys.epoch, self._redis.get(self.keys.epoch))

    def get_leader_folder(self) -> bytes | None:
        """Return the leader's description of its folder; None without a leader or description."""
        return select_leader_folder(*self._redis.mget(self.keys.leader, self.keys.folder))

    def close(self) -> None:
        """Close the connections.

        A thread that still has to end a heartbeat may open another, which it closes after its use.
        """
        self._closed = True
        self._redis.close()

    @contextmanager
    def _used(self) -> Iterator[Any]:
        """Yield the client; if the log is closed by then, close the connections of the block."""
        try:
            yield self._redis
        finally:
            if self._closed:
                self._redis.close()

    @contextmanager
    def _naming(self, key: str) -> Iterator[None]:
        """Raise KeyConflict if the key of a stream is of another type."""
        try:
            yield
        except redis.ResponseError as error:
            if is_exhausted(error):
                raise exhausted(f"the log of run {self.run_id}") from None
            if not str(error).startswith("WRONGTYPE"):
                raise
            actual = self._redis.type(key).decode()
            raise wrong_type(key, actual, "stream") from None
