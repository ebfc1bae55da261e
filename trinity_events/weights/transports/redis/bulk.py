"""Large values to and from a Redis server, without copies in between.

An ordinary client copies the bytes that it sends and receives. The connection here does not. It
works for servers without TLS that are not a cluster.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import redis

from ....errors import StructuredError
from ...tensors import Digesting

_AT_ONCE = 256
"""Bytes per read while the first line of a reply is awaited; the rest stays in the buffer."""
_LONGEST_LINE = 4096
_MOST_PIECES = 1000
"""Maximum memory pieces per system call (``IOV_MAX`` is 1024)."""
_PIECE = 256 << 10
"""Bytes that are digested and sent at a time."""
_SENT_AHEAD = 1 << 20
"""Bytes of the kernel's send buffer; its default is a fifth of that."""
# Exact classes: that of TLS is a subclass, whose socket must not be bypassed.
_PLAIN = (redis.connection.Connection, redis.connection.UnixDomainSocketConnection)


class BulkError(StructuredError):
    """This connection is unusable; the ordinary client may still work.

    Attributes:
        fault: ``connection`` if it failed, ``reply`` if the server refused, ``closed`` if the
            server closed it, ``line`` or ``value`` if a reply is malformed.
        reason: Error of the connection, or the server's reply.
    """

    fault: Literal["connection", "reply", "closed", "line", "value"]
    reason: str = ""
    texts: ClassVar = {
        "connection": "{reason}",
        "reply": "{reason}",
        "closed": "the server closed the connection",
        "line": "a reply's first line is too long",
        "value": "a value did not end where it should",
    }


class BulkConnection:
    """GET and SET on one socket, for one thread at a time, under the client's timeout."""

    def __init__(self, connected: Any) -> None:
        # redis-py has connected, authenticated and selected the database; its buffers are empty.
        self._connection = connected
        # Private attribute of redis-py's connection.
        self._socket: socket.socket = connected._sock
        if self._socket.family == socket.AF_UNIX:  # for other families the kernel tunes the buffer
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT_AHEAD)
        self._rest = bytearray()
        self._behind = memoryview(bytearray(_AT_ONCE))

    @classmethod
    def connect(cls, client: Any) -> BulkConnection | None:
        """Connect to a client's server as its user; return None if only the client itself can."""
        pool = getattr(client, "connection_pool", None)
        if pool is None or pool.connection_class not in _PLAIN:
            return None
        connection = pool.make_connection()
        connection.connect()
        return cls(connection)

    def send(self, key: str, value: memoryview, expire: int, seen: Digesting | None = None) -> None:
        """Begin a SET with an expiry in seconds; :meth:`finish_set` receives its reply.

        On return the kernel has the whole value, and ``seen`` has digested it. Both work piece by
        piece, so that the server copies one piece while the next is digested. Raises BulkError.
        """
        name, seconds = key.encode(), str(expire).encode()
        head = b"*5\r\n$3\r\nSET\r\n" + _bulk(name) + b"$%d\r\n" % len(value)
        tail = b"\r\n$2\r\nEX\r\n" + _bulk(seconds)
        size = _PIECE if seen is not None else max(1, len(value))
        parts = [memoryview(head)]
        try:
            for begin in range(0, len(value), size):
                parts.append(value[begin : begin + size])
                if seen is not None:
                    seen.update(parts[-1])
                if begin + size < len(value):
                    self._send(parts)
                    parts = []
            self._send([*parts, memoryview(tail)])
        except OSError as error:
            raise BulkError("connection", str(error)) from None

    def finish_set(self) -> None:
        """Receive the next reply to a SET. Raises BulkError, also if the server refused it."""
        try:
            line = self._line()
        except OSError as error:
            raise BulkError("connection", str(error)) from None
        if line != b"+OK":
            raise BulkError("reply", line.decode(errors="replace"))

    def begin_get(self, key: str) -> None:
        """Begin a GET; :meth:`finish_get` receives its reply. Raises BulkError."""
        try:
            self._send([memoryview(b"*2\r\n$3\r\nGET\r\n" + _bulk(key.encode()))])
        except OSError as error:
            raise BulkError("connection", str(error)) from None

    def finish_get(self, into: Sequence[memoryview], seen: Digesting) -> int | None:
        """Receive the next reply to a GET into these pieces of memory, in order.

        Return the length of the value, or None if it is missing; ``seen`` has digested it. A value
        of another length is not read, and the connection is unusable afterwards.

        Raises BulkError, also if the server refuses the GET.
        """
        try:
            line = self._line()
            if line == b"$-1":  # the null reply of RESP2
                return None
            if not line.startswith(b"$") or not line[1:].isdigit():
                raise BulkError("reply", line.decode(errors="replace"))
            length = int(line[1:])
            # The rest of the value is on its way and belongs nowhere: the stream cannot go on.
            if length != sum(map(len, into)):
                self.close()
                return length
            self._fill([piece for piece in into if len(piece)], seen)
            if self._exactly(2) != b"\r\n":
                raise BulkError("value")
        except OSError as error:
            raise BulkError("connection", str(error)) from None
        return length

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()

    def _send(self, parts: list[memoryview]) -> None:
        while parts:
            # One call for head, value and tail, without a copy that joins them.
            sent = self._socket.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def _line(self) -> bytes:
        while (end := self._rest.find(b"\r\n")) < 0:
            if len(self._rest) > _LONGEST_LINE:
                raise BulkError("line")
            self._more(_AT_ONCE)
        line = bytes(self._rest[:end])
        del self._rest[: end + 2]
        return line

    def _fill(self, pieces: list[memoryview], seen: Digesting) -> None:
        first = 0
        while first < len(pieces):
            count = min(len(self._rest), len(pieces[first]))
            if count:
                pieces[first][:count] = self._rest[:count]
                del self._rest[:count]
            else:
                count = self._receive(pieces[first : first + _MOST_PIECES], len(pieces) - first)
            while count and first < len(pieces):
                came = pieces[first][:count]
                seen.update(came)
                count -= len(came)
                pieces[first] = pieces[first][len(came) :]
                first += not len(pieces[first])
            self._rest += self._behind[:count]

    def _receive(self, rooms: list[memoryview], remaining: int) -> int:
        if len(rooms) == remaining:
            # Also read the bytes that follow: it saves two calls for each value.
            rooms.append(self._behind)
        count: int = self._socket.recvmsg_into(rooms)[0]
        if not count:
            raise BulkError("closed")
        return count

    def _exactly(self, count: int) -> bytes:
        while len(self._rest) < count:
            self._more(count - len(self._rest))
        data = bytes(self._rest[:count])
        del self._rest[:count]
        return data

    def _more(self, most: int) -> None:
        data = self._socket.recv(most)
        if not data:
            raise BulkError("closed")
        self._rest += data


def _bulk(data: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(data), data)
