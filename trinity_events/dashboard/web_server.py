"""Web server of a dashboard, its token and its address."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable, Sequence

from ..http_server.serving import open_listening_socket, serve_application
from .app import Opened, build_application


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
    # 192 bits.
    return secrets.token_urlsafe(24)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Raises AddressUnusable."""
    return open_listening_socket("the dashboard", host, port)


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
    app = build_application(opened, token=token, hosts=hosts)
    await serve_application(
        app, listening, on_start=started, on_stop=app.state.stop_streams, lifespan=True
    )


def page_url(host: str, port: int, token: str | None) -> str:
    """Return the address of the page; the token is in a part that browsers never send."""
    # All addresses: none of them can be opened, and loopback is one that this host has.
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host  # noqa: S104
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + ("" if token is None else f"#token={token}")
