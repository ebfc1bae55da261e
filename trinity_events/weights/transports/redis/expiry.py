"""Renewal of the expiry of parts on a Redis server while their publisher lives."""

from __future__ import annotations

import logging
import threading
from typing import Any, NamedTuple

import redis

from trinity_schemas import manifest_key

from ..base import PartRef
from .leases import chunk_keys

logger = logging.getLogger(__name__)

ORPHANED_AFTER = 6 * 3600
"""Seconds after which chunks expire whose publisher ended without deleting them."""
RENEWALS = 3
"""Renewals per expiry time."""
MOST = 6
"""Newest parts of a rank that are renewed: two, two more for evaluations, and those to retire."""


class _RenewedPart(NamedTuple):
    chunks: int
    base: PartRef | None


class ExpiryRenewal:
    """Thread that renews the expiry of a publisher's parts."""

    def __init__(self, client: Any, expire: int, renewals: int = RENEWALS) -> None:
        self.expire = expire
        self._renewals = renewals
        self._redis = client
        self._parts: dict[PartRef, _RenewedPart] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, part: PartRef, chunks: int, base: PartRef | None) -> None:
        """Renew a sealed part, and its base if it has one."""
        with self._lock:
            # Added again at the end, so that the order is by age.
            self._parts.pop(part, None)
            self._parts[part] = _RenewedPart(chunks, base)
            needed = self._find_needed()
            self._parts = {ref: entry for ref, entry in self._parts.items() if ref in needed}
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew_all, name="keeping", daemon=True)
            self._thread.start()

    def remove(self, part: PartRef) -> None:
        """Stop the renewal of a part that is deleted or published anew."""
        with self._lock:
            self._parts.pop(part, None)

    def close(self) -> None:
        """Stop all renewals, after the one that is under way: the client may be closed then."""
        self._stop.set()
        with self._lock:
            pass

    def _find_needed(self) -> set[PartRef]:
        """Return the newest parts of each rank, and all their bases."""
        needed: set[PartRef] = set()
        for rank in {part.rank for part in self._parts}:
            of_it = [part for part in self._parts if part.rank == rank]
            for ref in of_it[-MOST:]:
                part: PartRef | None = ref
                while part in self._parts and part not in needed:
                    needed.add(part)
                    part = self._parts[part].base
        return needed

    def _renew_all(self) -> None:
        while not self._stop.wait(self.expire / self._renewals):
            for part in list(self._parts):
                try:
                    self._renew(part)
                except (redis.RedisError, OSError) as error:
                    logger.debug("the expiry of the %s was not renewed this time: %s", part, error)

    def _renew(self, part: PartRef) -> None:
        with self._lock:  # a part that is deleted meanwhile is not renewed
            entry = self._parts.get(part)
            if entry is None or self._stop.is_set():
                return
            # No transaction: thousands of keys in one would block the server.
            with self._redis.pipeline(transaction=False) as pipe:
                for key in (manifest_key(*part), *chunk_keys(part, entry.chunks)):
                    pipe.expire(key, self.expire)
                pipe.execute()
