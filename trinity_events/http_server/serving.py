"""Serving of an application at a listening socket, by uvicorn with bounded connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, cast

import anyio
import uvicorn

from ..errors import TrinityError
from .connections import Connection, ConnectionLimits, ConnectionPool

ACCEPTED_AT_ONCE = 16
"""Connections that are accepted in one turn of the event loop, before others are read. Some turns
lie between a connection and its head: fewer connections of its address come meanwhile than may
wait, so that a flood does not end a connection whose head came with it."""
_QUEUED = 1024
"""Connections that the kernel queues until they are accepted."""
_SEND_BUFFER = 128 << 10
"""Bytes that the kernel keeps for a viewer that has not read them."""
_HEAD_BYTES = 32 << 10
"""Maximum bytes of a head."""

_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]
Application: TypeAlias = Callable[[_Message, _Receive, _Send], Awaitable[None]]
"""Application, as ASGI has it."""


class AddressUnusable(TrinityError):
    """A face cannot listen at its address.

    Attributes:
        face: The face, such as "the dashboard".
        host: Name or address of the host.
        port: The port.
        reason: Reason that the operating system gives.
    """

    face: str
    host: str
    port: int
    reason: str
    text = (
        "{face} cannot listen at {host} port {port} ({reason}): name another with --host and "
        "--port, where port 0 takes any free one"
    )


def open_listening_socket(face: str, host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        AddressUnusable: if the address is taken, or is none of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted connections inherit it: the kernel keeps no more for a slow viewer.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            listening.bind(address)
            listening.listen(_QUEUED)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise AddressUnusable(face, host, port, error.strerror or str(error)) from None
    return listening


async def serve_application(
    application: Application,
    listening: socket.socket,
    *,
    on_start: Callable[[], None],
    on_stop: Callable[[], None] = lambda: None,
    lifespan: bool = False,
    limits: ConnectionLimits = ConnectionLimits(),
) -> None:
    """Serve an application that reads no bodies at a listening socket, until cancelled.

    Args:
        application: The application.
        listening: The socket.
        on_start: Called once it answers.
        on_stop: Called before it stops, to end streams.
        lifespan: True if the application handles lifespan events; else they are not sent.
        limits: Limits and deadlines of its connections.
    """
    config = uvicorn.Config(
        _RefusedBodies(application),
        # uvicorn calls it with keywords, as it would a class.
        http=cast(type[asyncio.Protocol], partial(Connection, ConnectionPool(limits))),
        ws="none",
        lifespan="on" if lifespan else "off",
        log_level="error",  # peers could fill the log by warnings of requests that are none
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]  # a timer takes it
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=_HEAD_BYTES,
    )
    server = _Server(config, on_start, on_stop)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        with anyio.CancelScope(shield=True):
            await serving  # it closes its connections


class _Server(uvicorn.Server):
    """Server that reports when it answers, and when it is about to stop."""

    def __init__(
        self, config: uvicorn.Config, on_start: Callable[[], None], on_stop: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_start = on_start
        self._on_stop = on_stop

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the command, which cancels the server."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and report it."""
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(_QUEUED)  # asyncio takes one number for the queue and for a turn
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Report that it is about to stop, and stop."""
        self._on_stop()
        await super().shutdown(sockets)


class _RefusedBodies:
    """Middleware that refuses requests with a body, so that none is waited for.

    Args:
        application: The application.
    """

    def __init__(self, application: Application) -> None:
        self._application = application

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer a request, or refuse it and end its connection."""
        if scope["type"] != "http" or not _announces_body(scope["headers"]):
            await self._application(scope, receive, send)
            return
        body = json.dumps({"error": "this server reads no bodies: send requests without one"})
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body.encode()})


def _announces_body(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0")
        for name, value in headers
    )
