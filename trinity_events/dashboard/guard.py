"""Guard of the pages: it refuses foreign requests, and tells browsers what an answer may do."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..http_server.connections import ServerBusy, get_connection

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-security policy: no script and no style but the files of this package."""
_HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_OF_THIS_HOST = ("localhost", "ip6-localhost")


class Guard:
    """Middleware that refuses what no page of this server sent.

    A request needs a host name that this server is known by: a page elsewhere whose name was bound
    to this address (DNS rebinding) has another one. An IP address as host is no name, and so cannot
    be bound to. A request of another site's page is refused by the headers that browsers send.

    A request for data is admitted once its token was checked. Until then, and for the files of the
    page, its connection waits: it may end for another one of its address.

    Args:
        app: The application.
        token: Token that the data needs; None on loopback.
        hosts: Names that this server is known by, besides its own host's.
    """

    def __init__(self, app: ASGIApp, token: str | None, hosts: Collection[str] = ()) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        # Without a token the server is on loopback, where it has no other name.
        own = {socket.gethostname().lower()} if token is not None else set()
        self._hosts = {host.lower().rstrip(".") for host in (*_OF_THIS_HOST, *hosts, *own)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                # Answers have data of runs: browsers keep only the files of the page.
                if "cache-control" not in headers:
                    headers["cache-control"] = "no-store"
            await send(message)

        refused = self._refused(scope)
        if refused is not None:
            status, why = refused
            headers = {"allow": "GET, HEAD"} if status == 405 else {}
            if status == 401:
                headers = {"www-authenticate": "Bearer"}
            response = JSONResponse({"error": why}, status_code=status, headers=headers)
            await response(scope, receive, guarded)
            return
        if not _is_for_data(scope):
            await self._app(scope, receive, guarded)
            return
        try:
            with get_connection(scope).admitted():
                await self._app(scope, receive, guarded)
        except ServerBusy as error:
            response = JSONResponse(
                {"error": str(error)}, status_code=503, headers={"retry-after": "1"}
            )
            await response(scope, receive, guarded)

    def _refused(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the reason of a refusal; None for a request that may go on."""
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "this server only answers GET: nothing can be changed through it"
        host = headers.get("host", "")
        # With two, a proxy before this server may have gone by the other one.
        if len(headers.getlist("host")) != 1 or not self._is_known(host):
            # 421: misdirected request (RFC 9110, section 15.5.20).
            return 421, (
                f"{host[:80]!r} is not a name of this server: open it by its address, or start the "
                "dashboard with --allow-host"
            )
        if self._is_foreign(headers, host, scope["path"]):
            return 403, "requests of other sites' pages are refused"
        if _is_for_data(scope) and not self._has_token(headers):
            return 401, (
                "the token is missing or wrong: open the address that the dashboard printed when "
                "it started"
            )
        return None

    def _is_known(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        name = name.strip("[]").lower().rstrip(".")
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    @staticmethod
    def _is_foreign(headers: Headers, host: str, path: str) -> bool:
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return True
        # Programs other than browsers send no such header, and no user's page sends their requests.
        site = headers.get("sec-fetch-site", "none")
        if site in ("same-origin", "none"):
            return False
        # A link on another site may open the page itself, and none of its data.
        opened = headers.get("sec-fetch-mode") == "navigate" and path == "/"
        return not opened

    def _has_token(self, headers: Headers) -> bool:
        if self._token is None:
            return True
        kind, _, given = headers.get("authorization", "").partition(" ")
        # In constant time, so that the time of a refusal says nothing of the token.
        return kind.lower() == "bearer" and hmac.compare_digest(given.encode(), self._token)


def _is_for_data(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.startswith("/api/")
