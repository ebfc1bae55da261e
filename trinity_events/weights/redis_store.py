"""Chunks on a Redis server, which may be another than the log's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import redis
from typing_extensions import Buffer

from trinity_schemas import chunk_key, manifest_key

from .base import PartRef

ORPHANED_AFTER = 6 * 3600
"""Seconds after which chunks that nobody freed expire."""
_IN_FLIGHT = 4


class RedisChunkStore:
    """Implements :class:`~trinity_events.weights.ChunkStore`."""

    name = "redis"

    def __init__(self, client: redis.Redis, *, expire: int = ORPHANED_AFTER) -> None:
        self._redis: Any = client
        self._expire = expire

    def put_chunk(self, part: PartRef, index: int, data: Buffer) -> None:
        """Keep one chunk."""
        self._redis.set(chunk_key(*part, index), memoryview(data), ex=self._expire)

    def put_manifest(self, part: PartRef, manifest: bytes) -> None:
        """Keep the manifest: from now on the part can be read."""
        self._redis.set(manifest_key(*part), manifest, ex=self._expire)

    def get_manifest(self, part: PartRef) -> bytes | None:
        """The manifest, or None when the part is not there."""
        found: bytes | None = self._redis.get(manifest_key(*part))
        return found

    def get_chunks(self, part: PartRef, count: int) -> Iterator[Buffer | None]:
        """Chunks 0 to ``count`` - 1 in order; None for one that is not there."""
        for first in range(0, count, _IN_FLIGHT):
            window = range(first, min(first + _IN_FLIGHT, count))
            # All keys of a part have one hash tag, so this works on a cluster too.
            yield from self._redis.mget([chunk_key(*part, index) for index in window])

    def delete(self, part: PartRef, chunks: int) -> None:
        """Forget the part, its manifest first."""
        self._redis.unlink(
            manifest_key(*part), *(chunk_key(*part, index) for index in range(chunks))
        )

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()
