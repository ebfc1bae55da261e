"""Chunks on a Redis server, which may be another server than the log's."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import redis
from numpy.typing import NDArray

from trinity_schemas import ContractError, chunk_key, decode_manifest, manifest_key

from ....diagnostics.waits import NO_REPORTS, WaitReporter
from ....errors import VersionNotStored
from ....log.redis.scripts import Scripts
from ..base import Check, ChunkBuffers, PartRef, ReceivedChunk
from .expiry import ORPHANED_AFTER, RENEWALS, ExpiryRenewal
from .leases import LEASE, Lease, Retired, unlink
from .outages import ChunkServer
from .values import ChunkRead, LargeValues

Bytes: TypeAlias = NDArray[np.uint8]

CHUNK_BYTES = 2 << 20
"""Bytes of a chunk; each chunk has a fixed cost at client and server."""


class RedisChunkStore:
    """Implements :class:`~trinity_events.weights.ChunkStore`.

    A reader holds a lease on its part, timed by the server's clock. The part is deleted only once
    it is superseded and has no readers.

    Args:
        client: Client of the server.
        expire: Seconds after which the chunks of an ended publisher expire.
        lease: Seconds after which the lease of a dead reader ends.
        renewals: Renewals of the chunks within ``expire``.
        deadline: Seconds for which publishing and reading wait for a server that is away or full,
            in addition to the client's own attempts.
        waits: Returns the reporter of the process's long waits.
    """

    name = "redis"

    def __init__(
        self,
        client: redis.Redis,
        *,
        expire: int = ORPHANED_AFTER,
        lease: float = LEASE,
        renewals: int = RENEWALS,
        deadline: float = 0.0,
        waits: Callable[[], WaitReporter] = lambda: NO_REPORTS,
    ) -> None:
        self._redis: Any = client
        self._server = ChunkServer(client, deadline, waits)
        self._keeping = ExpiryRenewal(client, expire, renewals)
        self._lease = lease
        self._values = LargeValues(self._server)
        self._scripts = Scripts(client, __package__)
        self._retired = Retired(self._scripts, client)
        self._memory, self._rooms = _ReceiveMemory(), _ReceiveMemory()
        self._leases: set[Lease] = set()
        """Leases of all open parts."""

    def begin(self, part: PartRef, chunk_bytes: int | None = None) -> RedisSink:
        """Begin a part. It takes two chunks of memory, whatever the size of the model."""
        self._server.request(self._retired.free)
        self._server.request(partial(self._retired.make_way, part))
        self._keeping.remove(part)
        size = chunk_bytes or CHUNK_BYTES
        return RedisSink(self._redis, self._values, self._rooms, part, size, self._keeping)

    def open(self, part: PartRef) -> RedisSource | None:
        """Return the part under a new lease, or None if it is missing.

        Raises:
            DeadlineExceeded: The server stayed away.
        """
        return self._server.read(f"the {part} were not opened", partial(self._open, part))

    def _open(self, part: PartRef) -> RedisSource | None:
        # Before the manifest is read. A publisher removes the manifest first, so one of the two
        # sees the other (decision 18).
        lease = Lease(self._scripts, self._redis, part, self._lease)
        manifest: bytes | None = self._redis.get(manifest_key(*part))
        if manifest is None:
            lease.end()
            return None
        return RedisSource(
            self._server, self._values, self._memory, part, manifest, lease, self._leases
        )

    def delete(self, part: PartRef) -> None:
        """Refuse new readers of the part, and delete it once it has none."""
        self._keeping.remove(part)
        manifest: bytes | None = self._redis.get(manifest_key(*part))
        if manifest is None:
            return
        try:
            chunks = len(decode_manifest(manifest).chunks)
        except ContractError:
            chunks = 0  # the manifest is unreadable; the chunks expire
        self._retired.add(part, chunks)

    def missing(self, part: PartRef) -> VersionNotStored:
        """Return the error of a part that is missing here."""
        return VersionNotStored(str(part), fault="server")

    def close(self) -> None:
        """Close the connections. Published parts stay until they expire."""
        self._keeping.close()
        self._values.close()
        self._redis.close()


class RedisSink:
    """Implements :class:`~trinity_events.weights.PartSink`.

    One chunk is filled while the previous one is sent.
    """

    def __init__(
        self,
        client: Any,
        values: LargeValues,
        rooms: _ReceiveMemory,
        part: PartRef,
        chunk_bytes: int,
        keeping: ExpiryRenewal,
    ) -> None:
        self._redis = client
        self._values = values
        self._rooms = rooms
        self._part = part
        self._keeping = keeping
        self.chunk_bytes = chunk_bytes
        self._memory: Bytes | None = None
        self._chunks = 0

    def reserve(self) -> memoryview:
        """Return one of two buffers, by turns."""
        if self._memory is None:
            self._memory = self._rooms.acquire(2 * self.chunk_bytes)
        # The other half is being sent.
        begin = self._chunks % 2 * self.chunk_bytes
        return self._memory.data[begin : begin + self.chunk_bytes]

    def commit(self, nbytes: int) -> None:
        """Send the chunk."""
        key, data = chunk_key(*self._part, self._chunks), self.reserve()[:nbytes]
        # Counted before it is sent, so that a discard also removes a failed chunk.
        self._chunks += 1
        self._values.set(key, data, self._keeping.expire)

    def send(self, data: memoryview) -> str:
        """Send a chunk from the caller's memory."""
        key = chunk_key(*self._part, self._chunks)
        self._chunks += 1
        return self._values.set_digested(key, data, self._keeping.expire)

    def settle(self) -> None:
        """Wait until the server has all chunks."""
        self._values.settle()

    def seal(self, manifest: bytes, base: PartRef | None = None) -> None:
        """Send the manifest once the server has all chunks."""
        self._settle()
        self._values.set_whole(manifest_key(*self._part), manifest, self._keeping.expire)
        # After the manifest: a part that was not sealed is left to its expiry.
        self._keeping.add(self._part, self._chunks, base)

    def discard(self) -> None:
        """Delete the sent chunks, the manifest first."""
        self._keeping.remove(self._part)
        self._settle()  # no chunk may arrive after the deletion
        unlink(self._redis, self._part, self._chunks)

    def _settle(self) -> None:
        self._values.settle()
        if self._memory is not None:
            self._rooms.release(self._memory)
            self._memory = None


class RedisSource:
    """Implements :class:`~trinity_events.weights.PartSource`.

    A read of one part renews the leases of all open parts: their own turn may come later than a
    lease lasts.
    """

    def __init__(
        self,
        server: ChunkServer,
        values: LargeValues,
        memory: _ReceiveMemory,
        part: PartRef,
        manifest: bytes,
        lease: Lease,
        leases: set[Lease],
    ) -> None:
        self.manifest = manifest
        self._server = server
        self._values = values
        self._memory = memory
        self._part = part
        self._lease = lease
        self._leases = leases
        self._leases.add(lease)
        self._buffers: list[Bytes] = []

    def read(
        self, sizes: Sequence[int], check: Check, indices: Container[int] | None = None
    ) -> Sequence[memoryview]:
        """Receive the bytes into memory that belongs to the caller until :meth:`close`.

        The pages of unwanted chunks are not touched.
        """
        offsets = [0, *accumulate(sizes)]
        self._buffers.append(self._memory.acquire(offsets[-1]))
        memory = self._buffers[-1].data[: offsets[-1]]
        rooms = (
            (index, [memory[offsets[index] : offsets[index + 1]]])
            for index in range(len(sizes))
            if indices is None or index in indices
        )
        with closing(self.receive(rooms)) as received:
            for index, [room], length, digested in received:
                whole = length == len(room)
                # Of another length no byte was received: an empty chunk fails the check.
                data = room if whole else None if length is None else memoryview(b"")
                check(index, data, digested)
        return [memory]

    def receive(self, rooms: Iterable[ChunkBuffers]) -> Generator[ReceivedChunk]:
        """Receive chunks by index, each into pieces of the caller's memory."""
        requests = (ChunkRead(index, chunk_key(*self._part, index), into) for index, into in rooms)
        with closing(self._values.get(requests)) as chunks:
            for chunk in chunks:
                for lease in self._leases:
                    self._server.read(f"the {self._part} were not held", lease.renew)
                yield chunk

    def close(self) -> None:
        """End the lease; the memory is reused."""
        self._leases.discard(self._lease)
        self._lease.end()
        for buffer in self._buffers:
            self._memory.release(buffer)
        self._buffers = []


class _ReceiveMemory:
    """Reusable receive buffers: the first touch of a page costs as much as receiving it.

    The pool never holds more memory than was in use at once: a buffer that is too small is
    replaced.
    """

    def __init__(self) -> None:
        self._spare: list[Bytes] = []

    def acquire(self, nbytes: int) -> Bytes:
        """Return a buffer of at least ``nbytes``, with undefined content."""
        fitting = [index for index, buffer in enumerate(self._spare) if len(buffer) >= nbytes]
        if fitting:
            return self._spare.pop(min(fitting, key=lambda index: len(self._spare[index])))
        if self._spare:  # popped by index: == compares arrays element by element
            self._spare.pop(max(range(len(self._spare)), key=lambda at: len(self._spare[at])))
        return np.empty(nbytes, np.uint8)

    def release(self, memory: Bytes) -> None:
        """Return a buffer to the pool."""
        self._spare.append(memory)
