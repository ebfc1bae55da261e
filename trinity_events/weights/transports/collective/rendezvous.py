"""Address of a run's collective group, which the trainer writes to the weights' server."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import redis
from msgspec import Struct

from trinity_schemas.identity import Epoch, RunId
from trinity_schemas.keys import meeting_key

ORPHANED_AFTER = 6 * 3600
"""Seconds after which an announcement expires that the trainer did not withdraw."""
_FIELD = b"e"
_LONGEST_WAIT = 3.0
"""Maximum seconds of one blocking read; shorter than the connection's timeout."""


class WeightSyncInfo(Struct, frozen=True, kw_only=True):
    """Address at which a trainer's rank 0 waits for explorers, and the token they must send."""

    run_id: RunId
    epoch: Epoch
    address: str
    port: int
    token: str


_decoder = msgspec.msgpack.Decoder(WeightSyncInfo)


def own_address(client: redis.Redis) -> str:
    """Return the address at which clients of that server can reach this host.

    It is the address from which this host reaches the server, and explorers reach it too. If the
    server is on this host or has no host name, it is the address of the host's own name.
    """
    pool: Any = getattr(client, "connection_pool", None)
    where = getattr(pool, "connection_kwargs", {})
    address = _towards(where["host"], where.get("port", 6379)) if where.get("host") else None
    return address or socket.gethostbyname(socket.gethostname())


def _towards(host: str, port: int) -> str | None:
    """Return the source address of packets to a host, unless it is loopback; none is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            address = str(probe.getsockname()[0])
    except OSError:  # the host is unknown, or has IPv6 only
        return None
    return None if address.startswith("127.") else address


class Rendezvous:
    """Stream with one entry, at which explorers wait for a trainer without frequent polling."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._redis: Any = client
        self._key = meeting_key(run_id)

    def announce(self, info: WeightSyncInfo) -> None:
        """Announce this trainer's address; it replaces the address of an earlier trainer."""
        # A stream, on which explorers can block; one entry, since only the newest trainer counts.
        self._redis.xadd(self._key, {_FIELD: msgspec.msgpack.encode(info)}, maxlen=1)
        self._redis.expire(self._key, ORPHANED_AFTER)

    def renew(self, info: WeightSyncInfo) -> None:
        """Renew the announcement; if it is gone, write it again.

        It is gone if it has expired, or if the server restarted without persistence.
        """
        if not self._redis.expire(self._key, ORPHANED_AFTER):
            self.announce(info)

    def withdraw(self, info: WeightSyncInfo) -> None:
        """Remove the announcement, unless another trainer has replaced it."""
        for _, fields in self._redis.xrevrange(self._key, count=1):
            # The token makes it unique: a resumed trainer's entry stays.
            if fields.get(_FIELD) == msgspec.msgpack.encode(info):
                self._redis.unlink(self._key)

    def find(self, after: str, seconds: float) -> tuple[str, WeightSyncInfo] | None:
        """Wait up to ``seconds`` for an announcement after an entry; return its id and address."""
        wait = max(1, int(min(seconds, _LONGEST_WAIT) * 1000))
        for _, entries in self._redis.xread({self._key: after}, block=wait) or ():
            for entry_id, fields in reversed(entries):
                try:
                    return entry_id.decode(), _decoder.decode(fields[_FIELD])
                except (msgspec.DecodeError, KeyError):
                    return None  # written by a later version, or by another program
        return None
