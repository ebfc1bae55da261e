"""Web server of a dashboard: a listening socket, uvicorn, and connections that can be dropped."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from asyncio import Transport
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import anyio
import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import TrinityError
from .app import Opened, application

CONNECTIONS = 512
"""Maximum connections at once; a further one is answered with status 503."""


_SEND_BUFFER = 128 << 10
"""Bytes that the kernel keeps for a viewer that has not read them."""


class AddressUnusable(TrinityError):
    """The dashboard cannot listen at its address."""


class _Connection(H11Protocol):
    """Connection that can be dropped by its peer's address, with what it has not read."""

    open: dict[tuple[str, int], Transport] = {}  # noqa: RUF012 - of all connections of the process

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:
            self.open[self.client] = transport

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.client is not None:
            self.open.pop(self.client, None)


def drop(scope: Scope) -> None:
    """Close a request's connection at once, and free what it has not read."""
    client = scope.get("client")
    transport = None if client is None else _Connection.open.get(tuple(client))
    if transport is not None:
        transport.abort()


def is_loopback(host: str) -> bool:
    """Return True if only this machine's users can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def new_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_urlsafe(24)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address.

    Raises:
        AddressUnusable: if the address is taken, or is none of this machine.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Accepted connections inherit it: the kernel keeps no more for a slow viewer.
            found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            found.bind(address)
            found.listen(128)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise AddressUnusable(
            f"the dashboard cannot listen at {host} port {port} ({error.strerror or error}): name "
            "another with --host and --port, where port 0 takes any free one"
        ) from None
    return found


async def serve_board(
    opened: Opened,
    listening: socket.socket,
    token: str | None,
    hosts: Sequence[str],
    started: Callable[[], None],
) -> None:
    """Serve a dashboard at a listening socket, until interrupted.

    Args:
        opened: Opens the board.
        listening: The socket.
        token: Token that the data needs; None for none.
        hosts: Names that the server is known by.
        started: Called once it answers.
    """
    app = application(opened, token=token, hosts=hosts, drop=drop)
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=32 << 10,
    )
    server = _Server(config, started, app.state.stop_streams)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        with anyio.CancelScope(shield=True):
            await serving  # it closes its connections


class _Server(uvicorn.Server):
    """Server that tells when it answers, and when it is about to stop."""

    def __init__(
        self, config: uvicorn.Config, started: Callable[[], None], stopping: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._tell = started
        self._stopping = stopping

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the command, which cancels the server."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping()
        await super().shutdown(sockets)


def page_url(host: str, port: int, token: str | None) -> str:
    """Return the address of the page; the token is in a part that browsers never send."""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host  # noqa: S104
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + ("" if token is None else f"#token={token}")
