"""Large values on a Redis server, over a raw connection or through the client."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import redis

from ....errors import StructuredError
from ...tensors import Digesting, digest
from ..base import ReceivedChunk
from .bulk import BulkConnection, BulkError
from .outages import ChunkServer

_ASKED = 4
"""Pipelined GETs: one value is received while the server prepares the next."""


class ValueChanged(StructuredError, ConnectionError):
    """A value cannot be sent again, since it has changed after it was digested.

    Attributes:
        key: Its key.
    """

    key: str
    text = (
        "the connection to the weights' server broke, and the value of {key}, in transit, has "
        "changed meanwhile: publish the version again"
    )


class ChunkRead(NamedTuple):
    """Chunk to read, and the memory pieces that its bytes fill."""

    number: int
    """Index of the chunk."""
    key: str
    into: Sequence[memoryview]


class _Owed(NamedTuple):
    key: str
    value: memoryview
    expire: int
    digested: str | None = None


class LargeValues:
    """SET and GET of large values, for one thread at a time.

    The raw connection is opened on demand, where the server allows one. If it breaks, the client
    repeats the pending requests and reports the error.

    Args:
        server: The server, which may be away for a while.
    """

    def __init__(self, server: ChunkServer) -> None:
        self._server = server
        self._redis = server.client
        self._made: BulkConnection | None = None
        self._owed: deque[_Owed] = deque()

    def set(self, key: str, value: memoryview, expire: int) -> None:
        """SET a value. It must not change before the next SET or :meth:`settle`."""
        self._set(_Owed(key, value, expire))

    def set_whole(self, key: str, value: bytes | memoryview, expire: int) -> None:
        """SET a value through the client; return once the server has it."""
        self._server.request(partial(self._redis.set, key, value, ex=expire))

    def set_digested(self, key: str, value: memoryview, expire: int) -> str:
        """SET a value; return its digest.

        The memory is in use until the next SET or :meth:`settle`, but its content may change after
        the return. If a changed value has to be sent again, ConnectionError is raised.
        """
        seen = Digesting()
        # The client sent it, and digested nothing on the way.
        if not self._set(_Owed(key, value, expire), seen):
            return digest(value)
        digested = seen.digest()
        self._owed[-1] = self._owed[-1]._replace(digested=digested)
        return digested

    def _set(self, owed: _Owed, seen: Digesting | None = None) -> bool:
        """Return True if the value is being sent, False if the server has it already."""
        self._owed.append(owed)
        try:
            connection = self._connection()
            if connection is not None:
                connection.send(owed.key, owed.value, owed.expire, seen)
                # The server read the previous value while this one was copied and digested.
                self._settle(connection, but=1)
                return True
        except (BulkError, redis.RedisError, OSError):
            self.close()
        except BaseException:  # the connection is in the middle of a value
            self._owed.clear()
            self.close()
            raise
        self._redo()
        return False

    def settle(self) -> None:
        """Wait until the server has all values."""
        if self._made is not None:
            try:
                self._settle(self._made, but=0)
            except BulkError:
                self.close()
        self._redo()

    def get(self, requests: Iterable[ChunkRead]) -> Generator[ReceivedChunk]:
        """GET values straight into their memory.

        Yield the length of each value, or None if it is missing. A value of another length than its
        memory is not read.
        """
        # Replies come in order: those to SETs would be taken for values.
        self.settle()
        coming, remaining = deque[ChunkRead](), iter(requests)
        try:
            connection = self._connection()
            while connection is not None:
                for request in islice(remaining, _ASKED - len(coming)):
                    coming.append(request)
                    connection.begin_get(request.key)
                if not coming:
                    return
                seen = Digesting()
                length = connection.finish_get(coming[0].into, seen)
                number, _, into = coming.popleft()
                if length not in (None, sum(map(len, into))):
                    self.close()
                    connection = None
                yield ReceivedChunk(number, into, length, seen.digest())
        except (BulkError, redis.RedisError, OSError):
            self.close()
        except BaseException:  # the connection is in the middle of a reply
            self.close()
            raise
        while coming or (coming := deque(islice(remaining, _ASKED))):
            yield from self._copy(coming)
            coming = deque()

    def close(self) -> None:
        """Close the connection; the next use opens another."""
        if self._made is not None:
            self._made.close()
            self._made = None

    def _connection(self) -> BulkConnection | None:
        if self._made is None:
            self._made = BulkConnection.connect(self._redis)
        return self._made

    def _settle(self, connection: BulkConnection, but: int) -> None:
        while len(self._owed) > but:
            connection.finish_set()
            self._owed.popleft()

    def _redo(self) -> None:
        owed, self._owed = self._owed, deque()
        for key, value, expire, digested in owed:
            # The digest is in the manifest already: other bytes would be a corrupt chunk.
            if digested is not None and digest(value) != digested:
                raise ValueChanged(key)
            self.set_whole(key, value, expire)

    def _copy(self, requests: Sequence[ChunkRead]) -> Generator[ReceivedChunk]:
        # All keys of a part have one hash tag, so this works on a cluster too.
        keys = [request.key for request in requests]
        values = self._server.read(f"{keys[0]} was not read", partial(self._redis.mget, keys))
        for request, data in zip(requests, values, strict=True):
            if data is not None and len(data) == sum(map(len, request.into)):
                begin = 0
                for piece in request.into:
                    piece[:] = data[begin : begin + len(piece)]
                    begin += len(piece)
            length = None if data is None else len(data)
            yield ReceivedChunk(request.number, request.into, length, None)
