"""Chunks on a Redis server, which may be another than the log's."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import redis

from trinity_schemas import ContractError, chunk_key, decode_manifest, manifest_key

from .base import Check, PartRef

ORPHANED_AFTER = 6 * 3600
"""Seconds after which chunks that nobody freed expire."""
CHUNK_BYTES = 4 << 20
_IN_FLIGHT = 4


class RedisChunkStore:
    """Implements :class:`~trinity_events.weights.ChunkStore`."""

    name = "redis"

    def __init__(self, client: redis.Redis, *, expire: int = ORPHANED_AFTER) -> None:
        self._redis: Any = client
        self._expire = expire

    def begin(self, part: PartRef, chunk_bytes: int | None = None) -> RedisSink:
        """Begin a part. It holds one chunk in memory, whatever the size of the model."""
        return RedisSink(self._redis, part, chunk_bytes or CHUNK_BYTES, self._expire)

    def open(self, part: PartRef) -> RedisSource | None:
        """The part, or None when it is not there."""
        manifest: bytes | None = self._redis.get(manifest_key(*part))
        return None if manifest is None else RedisSource(self._redis, part, manifest)

    def delete(self, part: PartRef) -> None:
        """Forget the part."""
        manifest: bytes | None = self._redis.get(manifest_key(*part))
        if manifest is None:
            return
        try:
            chunks = len(decode_manifest(manifest).chunks)
        except ContractError:
            chunks = 0  # not ours; its chunks expire
        _unlink(self._redis, part, chunks)

    def missing(self, part: PartRef) -> str:
        """Why the part may not be there, in words."""
        return "retired, expired, or on another server"

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()


class RedisSink:
    """Implements :class:`~trinity_events.weights.base.PartSink`."""

    def __init__(self, client: Any, part: PartRef, chunk_bytes: int, expire: int) -> None:
        self._redis = client
        self._part = part
        self._expire = expire
        self._buffer = memoryview(bytearray(chunk_bytes))
        self._chunks = 0

    def room(self) -> memoryview:
        """The same memory for every chunk."""
        return self._buffer

    def put(self, nbytes: int) -> None:
        """Send the chunk."""
        key = chunk_key(*self._part, self._chunks)
        # Counted before: what is sent in vain is taken back like what arrived.
        self._chunks += 1
        self._redis.set(key, self._buffer[:nbytes], ex=self._expire)

    def seal(self, manifest: bytes) -> None:
        """Send the manifest."""
        self._redis.set(manifest_key(*self._part), manifest, ex=self._expire)

    def discard(self) -> None:
        """Forget what was sent, the manifest first."""
        _unlink(self._redis, self._part, self._chunks)


class RedisSource:
    """Implements :class:`~trinity_events.weights.base.PartSource`. The server holds no lease."""

    def __init__(self, client: Any, part: PartRef, manifest: bytes) -> None:
        self.manifest = manifest
        self._redis = client
        self._part = part

    def read(
        self, sizes: Sequence[int], check: Check, wanted: Container[int] | None = None
    ) -> memoryview:
        """The bytes, in memory of their own. Pages of what is not wanted are never touched."""
        memory = np.empty(sum(sizes), np.uint8).data
        offsets = [0, *accumulate(sizes)]
        indices = [index for index in range(len(sizes)) if wanted is None or index in wanted]
        for first in range(0, len(indices), _IN_FLIGHT):
            window = indices[first : first + _IN_FLIGHT]
            # All keys of a part have one hash tag, so this works on a cluster too.
            found = self._redis.mget([chunk_key(*self._part, index) for index in window])
            for index, data in zip(window, found, strict=True):
                check(index, None if data is None else memoryview(data))
                memory[offsets[index] : offsets[index + 1]] = data
        return memory

    def close(self) -> None:
        """Nothing is held."""


def _unlink(client: Any, part: PartRef, chunks: int) -> None:
    client.unlink(manifest_key(*part), *(chunk_key(*part, index) for index in range(chunks)))
