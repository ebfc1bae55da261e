"""Read leases on parts of a Redis server: a part is not deleted while it is read."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import Any

import redis

from trinity_schemas import chunk_key, leases_key, manifest_key

from ....log.redis.scripts import Scripts
from ..base import PartRef

LEASE = 30.0
"""Seconds after which the lease of a dead or stalled reader ends."""
LONGEST = 600.0
"""Maximum seconds for which a retired part stays for its readers."""
MOST_HELD = 2
"""Maximum retired versions of one publisher that stay for their readers."""


class Lease:
    """Read lease of one reader on one part; reading renews it."""

    def __init__(self, scripts: Scripts, client: Any, part: PartRef, seconds: float) -> None:
        self._scripts = scripts
        self._redis = client
        self._key = leases_key(*part)
        self._who = secrets.token_hex(8)
        self._seconds = seconds
        self._renewed = 0.0
        self.renew()

    def renew(self) -> None:
        """Renew the lease if it is due; call this after every read."""
        now = time.monotonic()
        # Two renewals may be lost before the lease ends.
        if now - self._renewed >= self._seconds / 3:
            lasting = max(1, round(1000 * self._seconds))
            # By the server's clock, as reader and publisher may be on hosts with different ones.
            self._scripts("take_lease", keys=[self._key], args=[self._who, lasting])
            self._renewed = now

    def end(self) -> None:
        """End the lease. If the server is unreachable, the lease expires by itself."""
        with suppress(redis.RedisError, OSError):
            self._redis.zrem(self._key, self._who)


class Retired:
    """Superseded parts of one publisher, some of which still have readers."""

    def __init__(self, scripts: Scripts, client: Any) -> None:
        self._scripts = scripts
        self._redis = client
        self._chunk_counts: dict[PartRef, int] = {}

    def add(self, part: PartRef, chunks: int) -> None:
        """Retire a part of ``chunks`` chunks: it is deleted once it has no readers.

        If too many retired versions have readers, the oldest is deleted anyway.
        """
        # First: readers may have ended, and nothing then needs to be dropped.
        self.free()
        if self._read(part, chunks):
            self._chunk_counts[part] = chunks
        # Versions, not parts: run, epoch and step without the rank.
        while len({part[:3] for part in self._chunk_counts}) > MOST_HELD:
            oldest = next(iter(self._chunk_counts))
            unlink(self._redis, oldest, self._chunk_counts.pop(oldest))

    def make_way(self, part: PartRef) -> None:
        """Delete a retired part that is published anew; its readers lose it."""
        chunks = self._chunk_counts.pop(part, None)
        if chunks is not None:
            unlink(self._redis, part, chunks)

    def free(self) -> None:
        """Delete the parts that have no readers any more."""
        self._chunk_counts = {
            part: chunks for part, chunks in self._chunk_counts.items() if self._read(part, chunks)
        }

    def _read(self, part: PartRef, chunks: int) -> bool:
        """Return True if a retired part has readers; otherwise delete it."""
        keys = [manifest_key(*part), leases_key(*part), *chunk_keys(part, chunks)]
        readers: int = self._scripts("retire", keys=keys, args=[round(1000 * LONGEST)])
        return readers > 0


def unlink(client: Any, part: PartRef, chunks: int) -> None:
    """Delete a part, the manifest first, even if it has readers."""
    client.unlink(manifest_key(*part), *chunk_keys(part, chunks))


def chunk_keys(part: PartRef, chunks: int) -> list[str]:
    """Return the keys of a part's chunks."""
    return [chunk_key(*part, index) for index in range(chunks)]
