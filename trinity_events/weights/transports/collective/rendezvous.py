"""Where a run's collective group meets, written on the weights' server by the trainer."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import redis
from msgspec import Struct

from trinity_schemas.identity import Epoch, RunId
from trinity_schemas.keys import meeting_key

ORPHANED_AFTER = 6 * 3600
"""Seconds after which what nobody took back expires."""
_FIELD = b"e"
_LONGEST_WAIT = 3.0
"""Seconds for which the server is asked to wait at once: less than a connection may be silent."""


class WeightSyncInfo(Struct, frozen=True, kw_only=True):
    """Where a trainer's rank 0 waits for explorers, and what they must say."""

    run_id: RunId
    epoch: Epoch
    address: str
    port: int
    token: str


_decoder = msgspec.msgpack.Decoder(WeightSyncInfo)


def own_address(client: redis.Redis) -> str:
    """The address at which those reach this host who reach that server.

    The one that this host reaches the server from, which explorers reach too. Of a server on this
    very host, or one that is not told of by a host alone, what the host's name stands for.
    """
    pool: Any = getattr(client, "connection_pool", None)
    where = getattr(pool, "connection_kwargs", {})
    found = _towards(where["host"], where.get("port", 6379)) if where.get("host") else None
    return found or socket.gethostbyname(socket.gethostname())


def _towards(host: str, port: int) -> str | None:
    """From which address packets to a host go, if it is not the loopback; none is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            address = str(probe.getsockname()[0])
    except OSError:  # no such host, or one of IPv6 alone
        return None
    return None if address.startswith("127.") else address


class Rendezvous:
    """One stream of one entry, so that explorers can wait for a trainer without asking often."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._redis: Any = client
        self._key = meeting_key(run_id)

    def announce(self, info: WeightSyncInfo) -> None:
        """Say where this trainer waits; the trainer before it is forgotten."""
        self._redis.xadd(self._key, {_FIELD: msgspec.msgpack.encode(info)}, maxlen=1)
        self._redis.expire(self._key, ORPHANED_AFTER)

    def keep(self, info: WeightSyncInfo) -> None:
        """Let what was announced stay for another while; where it is gone, say it again.

        It expired, or the server was started anew and had it in memory alone.
        """
        if not self._redis.expire(self._key, ORPHANED_AFTER):
            self.announce(info)

    def withdraw(self, info: WeightSyncInfo) -> None:
        """Nobody waits there any more, unless another trainer does by now."""
        for _, fields in self._redis.xrevrange(self._key, count=1):
            if fields.get(_FIELD) == msgspec.msgpack.encode(info):
                self._redis.unlink(self._key)

    def find(self, after: str, seconds: float) -> tuple[str, WeightSyncInfo] | None:
        """What was announced after an entry, and its id; waits for it, for so long."""
        wait = max(1, int(min(seconds, _LONGEST_WAIT) * 1000))
        for _, entries in self._redis.xread({self._key: after}, block=wait) or ():
            for entry_id, fields in reversed(entries):
                try:
                    return entry_id.decode(), _decoder.decode(fields[_FIELD])
                except (msgspec.DecodeError, KeyError):
                    return None  # of a later version, or nobody's
        return None
