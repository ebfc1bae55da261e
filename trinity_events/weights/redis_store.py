"""Chunks on a Redis server, which may be another than the log's."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import redis

from trinity_schemas import ContractError, chunk_key, decode_manifest, manifest_key

from .base import Check, PartRef
from .redis_bulk import BulkConnection, BulkError

ORPHANED_AFTER = 6 * 3600
"""Seconds after which chunks that nobody freed expire."""
CHUNK_BYTES = 1 << 20
"""Small enough to be digested and sent while it is still in the processor's cache."""
_IN_FLIGHT = 16


class RedisChunkStore:
    """Implements :class:`~trinity_events.weights.ChunkStore`."""

    name = "redis"

    def __init__(self, client: redis.Redis, *, expire: int = ORPHANED_AFTER) -> None:
        self._redis: Any = client
        self._expire = expire
        self._bulk = _Bulk(client)

    def begin(self, part: PartRef, chunk_bytes: int | None = None) -> RedisSink:
        """Begin a part. It holds one chunk in memory, whatever the size of the model."""
        return RedisSink(self._redis, self._bulk, part, chunk_bytes or CHUNK_BYTES, self._expire)

    def open(self, part: PartRef) -> RedisSource | None:
        """The part, or None when it is not there."""
        manifest: bytes | None = self._redis.get(manifest_key(*part))
        if manifest is None:
            return None
        return RedisSource(self._redis, self._bulk, part, manifest)

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
        self._bulk.close()
        self._redis.close()


class _Bulk:
    """The connection for large values, as long as there can be one; made when it is needed."""

    def __init__(self, client: Any) -> None:
        self._redis = client
        self._made: BulkConnection | None = None

    def set(self, key: str, value: memoryview, expire: int) -> bool:
        """SET; False when it must be done the client's way, which also says what is wrong."""
        try:
            connection = self._connection()
            if connection is not None:
                connection.set(key, value, expire)
        except (BulkError, redis.RedisError, OSError):
            self.close()
            return False
        return connection is not None

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[int | None] | None:
        """GET straight into memory; lengths, or None when it must be done the client's way.

        Nothing after a value of another length than its memory has is asked for.
        """
        found: list[int | None] = []
        try:
            connection = self._connection()
            if connection is None:
                return None
            connection.ask(keys)
            for room in into:
                found.append(connection.take(room))
                if found[-1] not in (None, len(room)):
                    self.close()
                    break
        except (BulkError, redis.RedisError, OSError):
            self.close()
            return None
        except BaseException:  # it is in the middle of an answer
            self.close()
            raise
        return found

    def close(self) -> None:
        """Close the connection; the next use makes another."""
        if self._made is not None:
            self._made.close()
            self._made = None

    def _connection(self) -> BulkConnection | None:
        if self._made is None:
            self._made = BulkConnection.of(self._redis)
        return self._made


class RedisSink:
    """Implements :class:`~trinity_events.weights.base.PartSink`."""

    def __init__(
        self, client: Any, bulk: _Bulk, part: PartRef, chunk_bytes: int, expire: int
    ) -> None:
        self._redis = client
        self._bulk = bulk
        self._part = part
        self._expire = expire
        self._buffer = memoryview(bytearray(chunk_bytes))
        self._chunks = 0

    def room(self) -> memoryview:
        """The same memory for every chunk."""
        return self._buffer

    def put(self, nbytes: int) -> None:
        """Send the chunk."""
        key, data = chunk_key(*self._part, self._chunks), self._buffer[:nbytes]
        # Counted before: what is sent in vain is taken back like what arrived.
        self._chunks += 1
        if not self._bulk.set(key, data, self._expire):
            self._redis.set(key, data, ex=self._expire)

    def seal(self, manifest: bytes) -> None:
        """Send the manifest."""
        self._redis.set(manifest_key(*self._part), manifest, ex=self._expire)

    def discard(self) -> None:
        """Forget what was sent, the manifest first."""
        _unlink(self._redis, self._part, self._chunks)


class RedisSource:
    """Implements :class:`~trinity_events.weights.base.PartSource`. The server holds no lease."""

    def __init__(self, client: Any, bulk: _Bulk, part: PartRef, manifest: bytes) -> None:
        self.manifest = manifest
        self._redis = client
        self._bulk = bulk
        self._part = part

    def read(
        self, sizes: Sequence[int], check: Check, wanted: Container[int] | None = None
    ) -> memoryview:
        """The bytes, received straight into memory of their own.

        Pages of what is not wanted are never touched.
        """
        memory = np.empty(sum(sizes), np.uint8).data
        offsets = [0, *accumulate(sizes)]
        indices = [index for index in range(len(sizes)) if wanted is None or index in wanted]
        for first in range(0, len(indices), _IN_FLIGHT):
            window = indices[first : first + _IN_FLIGHT]
            # All keys of a part have one hash tag, so this works on a cluster too.
            keys = [chunk_key(*self._part, index) for index in window]
            rooms = [memory[offsets[index] : offsets[index + 1]] for index in window]
            if not self._directly(window, keys, rooms, check):
                self._copied(window, keys, rooms, check)
        return memory

    def _directly(
        self,
        indices: Sequence[int],
        keys: Sequence[str],
        rooms: Sequence[memoryview],
        check: Check,
    ) -> bool:
        lengths = self._bulk.get(keys, rooms)
        if lengths is None:
            return False
        for index, length, room in zip(indices, lengths, rooms, strict=False):
            whole = length == len(room)
            check(index, room if whole else None if length is None else memoryview(b""))
        return True

    def _copied(
        self,
        indices: Sequence[int],
        keys: Sequence[str],
        rooms: Sequence[memoryview],
        check: Check,
    ) -> None:
        found = self._redis.mget(keys)
        for index, data, room in zip(indices, found, rooms, strict=True):
            check(index, None if data is None else memoryview(data))
            room[:] = data

    def close(self) -> None:
        """Nothing is held."""


def _unlink(client: Any, part: PartRef, chunks: int) -> None:
    client.unlink(manifest_key(*part), *(chunk_key(*part, index) for index in range(chunks)))
