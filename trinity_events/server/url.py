"""URLs of servers: parsing, and their form without secrets."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

import redis

from ..errors import InvalidUrl

_CLUSTER = "+cluster"
_SCHEMES = ("redis", "rediss", "unix", f"redis{_CLUSTER}", f"rediss{_CLUSTER}")
_PORT = 6379
_OF_AUTHORITIES = {"ssl_ca_certs": "cafile", "ssl_ca_path": "capath"}
_FILES = (*_OF_AUTHORITIES, "ssl_certfile", "ssl_keyfile")
_SHOWN = frozenset(
    (*_FILES, "ssl_cert_reqs", "ssl_check_hostname", "ssl_ciphers", "ssl_min_version")
) | {"db", "username", "client_name", "socket_connect_timeout"}
_OPTIONS = _SHOWN | {"password", "ssl_password"}
"""Options that a URL may set; others would change the replies or the retries."""
_DATABASE = re.compile(r"/?|/[0-9]+", re.ASCII)
_HIDDEN = "***"


class ServerSetting(NamedTuple):
    """Option and variable that name a server, with the default without them."""

    option: str
    variable: str
    instead: str
    keeps: str
    """Keys of the pipeline on that server, for a sentence."""

    @property
    def way_out(self) -> str:
        """Advice for an unsuitable server, for an error."""
        return f"leave {self.option} ({self.variable}) out {self.instead}"


LOG_SERVER = ServerSetting(
    "--redis-url", "TRINITY_REDIS_URL", "to use the embedded server", "keys of the log"
)
WEIGHTS_SERVER = ServerSetting(
    "--weights-redis-url",
    "TRINITY_WEIGHTS_REDIS_URL",
    "to keep the weight chunks beside the log",
    "weight chunks",
)


class ServerUrl(NamedTuple):
    """URL in the form of the client library, with the nodes of a cluster."""

    url: str
    cluster: bool
    """True if the URL names a cluster; without it the server may still be one."""
    more: tuple[tuple[str, int], ...]
    """Further start nodes of the cluster."""


def parse(url: str) -> ServerUrl:
    """Return the URL in the form of the client library. Raises InvalidUrl.

    It refuses every part of a URL that the client library would ignore or guess.
    """
    _refuse_unencoded(url)
    try:
        parts = urlsplit(url)
        scheme = parts.scheme.removesuffix(_CLUSTER)
        cluster = scheme != parts.scheme
        # From the end: a password may contain an at sign.
        user, at, hosts = parts.netloc.rpartition("@")
        # Several nodes are our extension; the client library takes one.
        first, *others = hosts.split(",") if cluster else [hosts]
        rest = url[len(f"{parts.scheme}://{parts.netloc}") :]
        plain = f"{scheme}://{user}{at}{first}{rest}"
        more = tuple(_address(address) for address in others)
        ports = [urlsplit(plain).port, *(port for _, port in more)]
        # Port 0 means "any" to a listener, and nothing to a client.
        wrong = "://" not in url or parts.scheme not in _SCHEMES or 0 in ports
        wrong = wrong or (scheme == "unix" and (bool(hosts) or not parts.path))
    except ValueError:
        wrong = True
    if wrong:
        raise InvalidUrl(redacted(url), "form")
    options = parse_qsl(parts.query)
    _check_options(url, parts.query)
    _check_database(url, parts.path if scheme != "unix" else "", dict(options))
    try:
        redis.ConnectionPool.from_url(plain).make_connection()  # connects to nothing
    except (TypeError, ValueError) as error:
        raise InvalidUrl(redacted(url), "library", reason=str(error)) from None
    _check_files(url, dict(options))
    return ServerUrl(plain, cluster, more)


def redacted(url: str) -> str:
    """Return the URL without its secrets, for a message.

    If a password may have unencoded characters, only the scheme is shown.
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        return _HIDDEN if "@" in url or "?" in url else url
    # Where the password ends is unknown, so that nothing behind it may be shown.
    if _is_unencoded(url):
        return f"{scheme}://{_HIDDEN}"
    address, question, query = rest.partition("?")
    user, at, hosts = address.rpartition("@")
    name, colon, _ = user.partition(":")
    shown = f"{name}:{_HIDDEN}{at}{hosts}" if at and colon else address
    options = "&".join(_redacted_option(option) for option in query.split("&")) if query else ""
    return f"{scheme}://{shown}{question}{options}"


def _redacted_option(option: str) -> str:
    name, equals, _ = option.partition("=")
    # A list of what may be shown: an unknown option may hold a secret.
    if unquote(name) in _SHOWN:
        return option
    return f"{name}{equals}{_HIDDEN}" if equals else _HIDDEN


def _is_unencoded(url: str) -> bool:
    """Return True if an at sign or number sign stands unencoded."""
    scheme, _, rest = url.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if "#" in rest:
        return True
    if scheme == "unix" and not authority:
        return False  # the at sign is part of a path
    return "@" in rest[len(authority) :]


def _refuse_unencoded(url: str) -> None:
    """Raise InvalidUrl if the client library would take a part of a password for the host."""
    if "://" in url and _is_unencoded(url):
        raise InvalidUrl(redacted(url), "encoding")


def _check_options(url: str, query: str) -> None:
    """Raise InvalidUrl for an option that users may not set."""
    for option in query.split("&") if query else []:
        name, equals, value = option.partition("=")
        if equals and value and unquote(name) in _OPTIONS:
            continue
        allowed = tuple(sorted(_OPTIONS))
        if equals and value:
            raise InvalidUrl(redacted(url), "option", option=unquote(name), allowed=allowed)
        raise InvalidUrl(redacted(url), "no value", allowed=allowed)  # a name may be a secret


def _check_database(url: str, path: str, options: dict[str, str]) -> None:
    """Raise InvalidUrl for a database that is no number: the client would take 0."""
    number = options.get("db")
    wrong = not _DATABASE.fullmatch(path)
    if number is not None:
        wrong = wrong or path.strip("/") != "" or not (number.isascii() and number.isdigit())
    if wrong:
        raise InvalidUrl(redacted(url), "database")


def _check_files(url: str, options: dict[str, str]) -> None:
    """Raise InvalidUrl for a missing file, which the client would report as an absent server."""
    for option in _FILES:
        path = options.get(option)
        if path is None:
            continue
        try:
            Path(path).stat()
            if option in _OF_AUTHORITIES:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
                    **{_OF_AUTHORITIES[option]: path}
                )
        except OSError as error:
            reason = error.strerror or str(error)
            raise InvalidUrl(
                redacted(url), "file", option=option, path=path, reason=reason
            ) from None


def _address(node: str) -> tuple[str, int]:
    parts = urlsplit(f"//{node}")
    port = parts.port
    return parts.hostname or "", _PORT if port is None else port
