"""Connections of an HTTP server, bounded whatever their peers send or leave unsent.

uvicorn limits the number of connections, the size of a head and the pause between two requests. It
has no deadline for a head or a body, and no limit for an address: peers that send half a request
hold its whole limit for as long as they like.

Invariants, with the limits of :class:`ConnectionLimits`:

1. A connection *waits*, unless it is in a request that its face admitted: one with a complete head
   and, if the face has a token, with the token.
2. At most ``waiting`` connections wait, and ``waiting_per_address`` of one address. A
   further one ends the connection that waits longest of the address that has most.
3. No connection in an admitted request ends for one that waits.
4. A head is complete ``head_seconds`` after the connection, or the first byte of a later
   request, came. Further bytes do not extend it.
5. No body is read: a request that announces one is refused, and its connection ends.
6. A connection without a request ends after ``idle_seconds``, and one whose peer leaves an
   answer unread after ``read_seconds``.
7. At most ``requests`` requests are admitted, ``requests_per_address`` of one address, and
   ``streams`` streams. A further stream ends the oldest one of the address that has most.

So peers without the token cannot keep out one that has it: its connection is accepted, and is
admitted once its head has arrived.
"""

from __future__ import annotations

import asyncio
import ipaddress
from asyncio import Transport
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from msgspec import Struct
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from ..errors import TrinityError

_CONNECTION = "trinity_events.connection"
"""Key of the connection in the state of a request."""


class ServerBusy(TrinityError):
    """The server answers as many requests as it may.

    Attributes:
        limit: Maximum requests at once.
        address: Address that has them all, or None if all addresses together have them.
    """

    limit: int
    address: str | None

    def __str__(self) -> str:
        whose = "" if self.address is None else f" of {self.address}"
        return f"{self.limit} requests{whose} are being answered: try again in a second"


_T = TypeVar("_T")


class GroupedByAddress(Generic[_T]):
    """Items by address, those of an address in the order in which they came."""

    def __init__(self) -> None:
        self._items: dict[str, dict[_T, None]] = {}
        self.total = 0

    def count(self, address: str) -> int:
        """Return the number of an address's items."""
        return len(self._items.get(address, ()))

    def add(self, address: str, item: _T) -> None:
        """Add an item as the newest of its address."""
        self.discard(address, item)
        self._items.setdefault(address, {})[item] = None
        self.total += 1

    def discard(self, address: str, item: _T) -> None:
        """Remove an item if it is there."""
        items = self._items.get(address, {})
        if item in items:
            del items[item]
            self.total -= 1
            if not items:
                del self._items[address]

    def pop_oldest(self, address: str | None = None) -> _T:
        """Remove and return the oldest item of an address, by default of the one that has most."""
        if address is None:
            address = max(self._items, key=self.count)
        item = next(iter(self._items[address]))
        self.discard(address, item)
        return item


class ConnectionLimits(Struct, frozen=True, kw_only=True):
    """Limits and deadlines of the connections of one server.

    Attributes:
        waiting: Maximum connections that wait. With requests, streams and connections that are
            being closed, the process stays far below 1,024 open files, the usual limit.
        waiting_per_address: Maximum connections of one address that wait. A browser opens six;
            more than the connections that are accepted while a head is read (see
            ``ACCEPTED_AT_ONCE`` of the server).
        requests: Maximum requests that are answered at once; their answers take milliseconds.
        requests_per_address: Maximum requests of one address, so that no address takes all; a
            proxy is one address.
        streams: Maximum streams, each a page that follows a run.
        head_seconds: Deadline of a head, which fits into a packet or two: a lost one comes again
            within 3 s.
        idle_seconds: Seconds for which a connection without a request is kept for the next one.
        read_seconds: Seconds for which a peer may leave an answer unread: an answer of some MiB on
            a slow link.
    """

    waiting: int = 128
    waiting_per_address: int = 64
    requests: int = 128
    requests_per_address: int = 64
    streams: int = 256
    head_seconds: float = 10.0
    idle_seconds: float = 30.0
    read_seconds: float = 60.0


class ConnectionPool:
    """Connections of one server, by what they do.

    Args:
        limits: Limits of their numbers, and their deadlines.
    """

    def __init__(self, limits: ConnectionLimits = ConnectionLimits()) -> None:
        self.limits = limits
        self._waiting: GroupedByAddress[Connection] = GroupedByAddress()
        self._requests: GroupedByAddress[Connection] = GroupedByAddress()
        self._streams: GroupedByAddress[Connection] = GroupedByAddress()

    def add_waiting(self, connection: Connection) -> None:
        """Let a connection wait; end others that wait too long for the limits."""
        self.remove(connection)
        self._waiting.add(connection.address, connection)
        while self._waiting.count(connection.address) > self.limits.waiting_per_address:
            self._waiting.pop_oldest(connection.address).drop()
        while self._waiting.total > self.limits.waiting:
            self._waiting.pop_oldest().drop()

    def add_request(self, connection: Connection) -> None:
        """Admit a request. Raises ServerBusy, and the connection still waits."""
        if self._requests.count(connection.address) >= self.limits.requests_per_address:
            raise ServerBusy(self.limits.requests_per_address, connection.address)
        if self._requests.total >= self.limits.requests:
            raise ServerBusy(self.limits.requests, None)
        self.remove(connection)
        self._requests.add(connection.address, connection)

    def add_stream(self, connection: Connection) -> None:
        """Make a stream of an admitted request; end another one if there are too many."""
        self.remove(connection)
        while self._streams.total >= self.limits.streams:
            self._streams.pop_oldest().drop()
        self._streams.add(connection.address, connection)

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        for group in (self._waiting, self._requests, self._streams):
            group.discard(connection.address, connection)


class Connection(H11Protocol):
    """Connection of a pool, with deadlines. A face finds it by :func:`get_connection`.

    Args:
        pool: Connections of the server.
        settings: Arguments of uvicorn.
    """

    def __init__(self, pool: ConnectionPool, **settings: Any) -> None:
        state = {**settings.pop("app_state"), _CONNECTION: self}
        super().__init__(app_state=state, **settings)
        self.address = ""
        self._pool = pool
        self._admitted = 0
        self._is_lost = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Let the connection wait for a head."""
        super().connection_made(transport)
        self.address = _find_address(self.client)
        self._pool.add_waiting(self)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        super().connection_lost(exc)
        self._is_lost = True
        self._pool.remove(self)
        self._cancel_head_timer()
        self._cancel_read_timer()

    def data_received(self, data: bytes) -> None:
        """Handle a part of a request; bytes that complete no head leave its deadline as it is."""
        super().data_received(data)
        if self._is_answering:
            self._end_waiting()
        else:
            self._await_head()

    def on_response_complete(self) -> None:
        """Give the peer a time to read the answer."""
        self._cancel_read_timer()
        # Also if uvicorn closes the connection: that waits until the peer has read.
        self._read_timer = self.loop.call_later(self._pool.limits.read_seconds, self._drop_unread)
        super().on_response_complete()  # begins the next request if its head was sent already
        if self._is_answering:
            self._end_waiting()
        elif self.conn.trailing_data[0]:  # a part of the next head was sent already
            self._await_head()

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count as an admitted request in the block.

        Raises:
            ServerBusy: if there are too many.
        """
        if not self._admitted:  # else the request before, whose answer was sent, has its place
            self._pool.add_request(self)
        self._admitted += 1
        try:
            yield
        finally:
            self._admitted -= 1
            if self._is_lost:  # maybe before the request was admitted
                self._pool.remove(self)
            elif not self._admitted:
                self._pool.add_waiting(self)

    def become_stream(self) -> None:
        """Count as a stream for the rest of the admitted request."""
        self._pool.add_stream(self)

    def drop(self) -> None:
        """Close the connection at once, and free what its peer has not read."""
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # uvicorn declares it as never None
        return cycle is not None and not cycle.response_complete

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._pool.limits.head_seconds, self.drop)

    def _end_waiting(self) -> None:
        self._cancel_head_timer()
        if not self.transport.get_write_buffer_size():
            self._cancel_read_timer()  # else it would end the next answer, such as a stream

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cancel_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _drop_unread(self) -> None:
        if self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.drop()


def get_connection(scope: Mapping[str, Any]) -> Connection:
    """Return the connection of a request."""
    connection: Connection = scope["state"][_CONNECTION]
    return connection


def _find_address(client: tuple[str, int] | None) -> str:
    """Return the address of a peer that counts: of IPv6 the network that one site may number."""
    host = "" if client is None else client[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    # A host takes any address of its /64 (RFC 4862), so that it would have as many as it likes.
    return str(ipaddress.ip_network((address, 64), strict=False))
