"""URLs of servers: which there are, and how they are shown."""

from __future__ import annotations

import re
import ssl
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import redis

from ..errors import InvalidUrl

_CLUSTER = "+cluster"
_SCHEMES = ("redis", "rediss", "unix", f"redis{_CLUSTER}", f"rediss{_CLUSTER}")
_PORT = 6379
_OF_AUTHORITIES = {"ssl_ca_certs": "cafile", "ssl_ca_path": "capath"}
_FILES = (*_OF_AUTHORITIES, "ssl_certfile", "ssl_keyfile")
_PASSWORD = re.compile(r"((?:^|&)(?:ssl_)?password=)[^&]*")


class Setting(NamedTuple):
    """What names a server, and what becomes of it where that is left out."""

    option: str
    variable: str
    instead: str
    keeps: str
    """The keys that the pipeline has on it, for a sentence."""

    @property
    def way_out(self) -> str:
        """What to do about a server that is not what it should be."""
        return f"leave {self.option} ({self.variable}) out {self.instead}"


LOG_SERVER = Setting(
    "--redis-url", "TRINITY_REDIS_URL", "to use the embedded server", "keys of the log"
)
WEIGHTS_SERVER = Setting(
    "--weights-redis-url",
    "TRINITY_WEIGHTS_REDIS_URL",
    "to keep the weight chunks beside the log",
    "weight chunks",
)


class ServerUrl(NamedTuple):
    """A URL as the client library takes it, and what it cannot say."""

    url: str
    cluster: bool
    """Whether it names a cluster; any other may turn out to be one."""
    more: tuple[tuple[str, int], ...]
    """Further nodes of the cluster to begin with."""


def parse(url: str) -> ServerUrl:
    """The URL, if it is one of a server. Raises InvalidUrl."""
    try:
        parts = urlsplit(url)
        scheme = parts.scheme.removesuffix(_CLUSTER)
        cluster = scheme != parts.scheme
        user, at, hosts = parts.netloc.rpartition("@")
        first, *others = hosts.split(",") if cluster else [hosts]
        rest = url[len(f"{parts.scheme}://{parts.netloc}") :]
        plain = f"{scheme}://{user}{at}{first}{rest}"
        more = tuple(_address(one) for one in others)
        ports = [urlsplit(plain).port, *(port for _, port in more)]
        wrong = "://" not in url or parts.scheme not in _SCHEMES or 0 in ports
    except ValueError:
        wrong = True
    if wrong:
        shown = url.rpartition("@")[2]  # never the password
        raise InvalidUrl(
            f"{shown!r} is not the URL of a Redis server: use redis://HOST:PORT, "
            "rediss://HOST:PORT, unix:///PATH or redis+cluster://HOST:PORT,HOST:PORT"
        )
    try:
        redis.ConnectionPool.from_url(plain).make_connection()  # connects to nothing
    except (TypeError, ValueError) as error:
        raise InvalidUrl(
            f"{redacted(url)} has an option that is unknown or wrong ({error}): "
            "leave it out, or see the options of TLS in docs/security.md"
        ) from None
    _check_files(url, urlsplit(plain).query)
    return ServerUrl(plain, cluster, more)


def redacted(url: str) -> str:
    """The URL without its password, fit for a message."""
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    if at and colon:
        url = url.replace(f"//{parts.netloc}", f"//{name}:***@{hosts}", 1)
    before, mark, query = url.partition("?")
    return before + mark + _PASSWORD.sub(r"\1***", query)


def _check_files(url: str, query: str) -> None:
    """Raise InvalidUrl for a file that is not there: the client would call it an absent server."""
    options = {name: values[0] for name, values in parse_qs(query).items()}
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
            raise InvalidUrl(
                f"{path}, which {redacted(url)} names as {option}, cannot be used "
                f"({error.strerror or error}): name one that can, and see docs/security.md"
            ) from None


def _address(node: str) -> tuple[str, int]:
    parts = urlsplit(f"//{node}")
    port = parts.port
    return parts.hostname or "", _PORT if port is None else port
