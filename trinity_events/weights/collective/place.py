"""Where a run's collective group meets, written on the weights' server by the trainer."""

from __future__ import annotations

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


class MeetingPlace:
    """One stream of one entry, so that explorers can wait for a trainer without asking often."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._redis: Any = client
        self._key = meeting_key(run_id)

    def announce(self, info: WeightSyncInfo) -> None:
        """Say where this trainer waits; the trainer before it is forgotten."""
        self._redis.xadd(self._key, {_FIELD: msgspec.msgpack.encode(info)}, maxlen=1)
        self.keep()

    def keep(self) -> None:
        """Let what was announced stay for another while."""
        self._redis.expire(self._key, ORPHANED_AFTER)

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
