"""Error replies: a server that refuses is there, and says why."""

from __future__ import annotations

import re
from typing import NamedTuple

import redis
import redis.exceptions as of_redis

_REPLIES = (
    redis.ResponseError,
    redis.BusyLoadingError,
    redis.AuthenticationError,
    of_redis.AuthorizationError,
)
"""Types that the client has for replies, although some of them are of lost connections."""
_NO_PLACE = "max number of clients reached"
"""A reply for which the client has no type but that of lost connections."""

_IN_SCRIPT = re.compile(r" script: (?:\S+, )?on @user_script:\d+\.?$")
"""The place in a script of ours that a reply names, which tells users nothing."""


class _Refusal(NamedTuple):
    """A kind of error reply, by its code, and by its type where the client has one."""

    code: str
    type: type[Exception] | None
    way_out: str


_KNOWN = (
    _Refusal("MISCONF", None, "it cannot write its files; make room on its disk"),
    _Refusal("OOM", redis.OutOfMemoryError, "it is full; raise its maxmemory, or remove data"),
    _Refusal("READONLY", redis.ReadOnlyError, "it is a replica; name the primary"),
    _Refusal("LOADING", redis.BusyLoadingError, "it is reading its data; wait until it has"),
    _Refusal("MASTERDOWN", of_redis.MasterDownError, "it is a replica; start its primary"),
    _Refusal("NOREPLICAS", None, "it waits for replicas; see min-replicas-to-write"),
    _Refusal("BUSY", None, "a script holds it up; wait for it, or use SCRIPT KILL"),
)


def is_reply(error: BaseException) -> bool:
    """Return True if a server sent this error, and so is there."""
    return isinstance(error, _REPLIES) or str(error).startswith(_NO_PLACE)


def reply_text(error: BaseException) -> str:
    """Return the error as text: a reply with its code, and with the way out where one is known."""
    text = _IN_SCRIPT.sub("", str(error)).rstrip(".")
    for code, of_type, way_out in _KNOWN:
        begins = is_reply(error) and text.startswith(f"{code} ")
        if begins or (of_type is not None and isinstance(error, of_type)):
            return f"{text if begins else f'{code} {text}'}: {way_out}"
    return text
