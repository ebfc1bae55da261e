"""Who reads a part on a Redis server: what is read is not freed, for as long as it may take."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import Any

import redis

from trinity_schemas import chunk_key, leases_key, manifest_key

from ....log.scripts import Scripts
from ..base import PartRef

LEASE = 30.0
"""Seconds after which the lease of a reader that died, or that gets nothing, ends."""
LONGEST = 600.0
"""Seconds for which a retired part stays for its readers, at most."""
MOST_HELD = 2
"""Retired versions of one publisher that stay for their readers, at most."""


class Lease:
    """One reader's on one part, from the beginning; renewed by what it reads.

    Args:
        scripts: Of the server.
        client: To the server.
        part: Which part.
        seconds: How long it lasts unless it is renewed.
    """

    def __init__(self, scripts: Scripts, client: Any, part: PartRef, seconds: float) -> None:
        self._scripts = scripts
        self._redis = client
        self._key = leases_key(*part)
        self._who = secrets.token_hex(8)
        self._seconds = seconds
        self._renewed = 0.0
        self.renew()

    def renew(self) -> None:
        """To be called whenever something was read; the server is asked now and then."""
        now = time.monotonic()
        if now - self._renewed >= self._seconds / 3:
            self._renewed = now
            lasting = max(1, round(1000 * self._seconds))
            self._scripts("take_lease", keys=[self._key], args=[self._who, lasting])

    def end(self) -> None:
        """It may be freed. Where the server cannot be told, the lease ends by itself."""
        with suppress(redis.RedisError, OSError):
            self._redis.zrem(self._key, self._who)


class Retired:
    """Parts of one publisher that are superseded, of which some are still read.

    Args:
        scripts: Of the server.
        client: To the server.
    """

    def __init__(self, scripts: Scripts, client: Any) -> None:
        self._scripts = scripts
        self._redis = client
        self._held: dict[PartRef, int] = {}

    def add(self, part: PartRef, chunks: int) -> None:
        """A part of so many chunks is superseded: it is freed once nobody reads it.

        Of too many versions that are read the oldest goes all the same.
        """
        self.free()
        if self._read(part, chunks):
            self._held[part] = chunks
        while len({one[:3] for one in self._held}) > MOST_HELD:
            oldest = next(iter(self._held))
            unlink(self._redis, oldest, self._held.pop(oldest))

    def make_way(self, part: PartRef) -> None:
        """The part is published anew: who still reads what it was has lost it."""
        chunks = self._held.pop(part, None)
        if chunks is not None:
            unlink(self._redis, part, chunks)

    def free(self) -> None:
        """Free those that nobody reads any more."""
        self._held = {
            part: chunks for part, chunks in self._held.items() if self._read(part, chunks)
        }

    def _read(self, part: PartRef, chunks: int) -> bool:
        """Whether a part, which nobody can begin to read any more, is read; else it is freed."""
        keys = [manifest_key(*part), leases_key(*part), *chunk_keys(part, chunks)]
        readers: int = self._scripts("retire", keys=keys, args=[round(1000 * LONGEST)])
        return readers > 0


def unlink(client: Any, part: PartRef, chunks: int) -> None:
    """Free a part, the manifest first, whoever reads it."""
    client.unlink(manifest_key(*part), *chunk_keys(part, chunks))


def chunk_keys(part: PartRef, chunks: int) -> list[str]:
    """Where the chunks of a part are."""
    return [chunk_key(*part, index) for index in range(chunks)]
