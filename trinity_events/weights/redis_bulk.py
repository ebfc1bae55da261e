"""Large values to and from a Redis server, straight out of and into memory of ours.

A client of the usual kind copies what it sends and what it receives. Here is one connection that
does not, for servers that are reached without TLS and are no cluster.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import redis

_AT_ONCE = 256
"""Bytes that are read while a reply's first line is looked for; what follows is in our buffer."""
_LONGEST_LINE = 4096
_PLAIN = (redis.connection.Connection, redis.connection.UnixDomainSocketConnection)


class BulkError(Exception):
    """This connection is of no use any more; the client's own way may still be."""


class BulkConnection:
    """GET and SET on one socket, for one thread at a time. Every wait is the client's timeout."""

    def __init__(self, connected: Any) -> None:
        # redis-py has connected, named its user and chosen the database; its buffers are empty.
        self._connection = connected
        self._socket: socket.socket = connected._sock
        self._rest = bytearray()

    @classmethod
    def of(cls, client: Any) -> BulkConnection | None:
        """To a client's server, as its user; None where it must be the client's own way."""
        pool = getattr(client, "connection_pool", None)
        if pool is None or pool.connection_class not in _PLAIN:
            return None
        connection = pool.make_connection()
        connection.connect()
        return cls(connection)

    def set(self, key: str, value: memoryview, expire: int) -> None:
        """SET with an expiry in seconds. Raises BulkError, also for what the server refuses."""
        name, seconds = key.encode(), str(expire).encode()
        head = b"*5\r\n$3\r\nSET\r\n" + _bulk(name) + b"$%d\r\n" % len(value)
        tail = b"\r\n$2\r\nEX\r\n" + _bulk(seconds)
        try:
            self._send([memoryview(head), value, memoryview(tail)])
            line = self._line()
        except OSError as error:
            raise BulkError(str(error)) from None
        if line != b"+OK":
            raise BulkError(line.decode(errors="replace"))

    def ask(self, keys: Sequence[str]) -> None:
        """Send a GET for each of the keys, whose answers :meth:`take` takes in their order."""
        try:
            for key in keys:
                self._send([memoryview(b"*2\r\n$3\r\nGET\r\n" + _bulk(key.encode()))])
        except OSError as error:
            raise BulkError(str(error)) from None

    def take(self, into: memoryview) -> int | None:
        """The next value, which is to fill ``into``; returns its length, None when it is not there.

        Nothing of one of another length is read: the connection is of no use then.

        Raises BulkError, also for what the server refuses.
        """
        try:
            line = self._line()
            if line == b"$-1":
                return None
            if not line.startswith(b"$") or not line[1:].isdigit():
                raise BulkError(line.decode(errors="replace"))
            length = int(line[1:])
            if length != len(into):
                self.close()
                return length
            self._fill(into)
            if self._exactly(2) != b"\r\n":
                raise BulkError("a value did not end where it should")
        except OSError as error:
            raise BulkError(str(error)) from None
        return length

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()

    def _send(self, parts: list[memoryview]) -> None:
        while parts:
            sent = self._socket.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def _line(self) -> bytes:
        while (end := self._rest.find(b"\r\n")) < 0:
            if len(self._rest) > _LONGEST_LINE:
                raise BulkError("an answer has no end")
            self._more(_AT_ONCE)
        line = bytes(self._rest[:end])
        del self._rest[: end + 2]
        return line

    def _fill(self, into: memoryview) -> None:
        here = min(len(self._rest), len(into))
        into[:here] = self._rest[:here]
        del self._rest[:here]
        while here < len(into):
            count = self._socket.recv_into(into[here:])
            if not count:
                raise BulkError("the server closed the connection")
            here += count

    def _exactly(self, count: int) -> bytes:
        while len(self._rest) < count:
            self._more(count - len(self._rest))
        data = bytes(self._rest[:count])
        del self._rest[:count]
        return data

    def _more(self, most: int) -> None:
        data = self._socket.recv(most)
        if not data:
            raise BulkError("the server closed the connection")
        self._rest += data


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)
