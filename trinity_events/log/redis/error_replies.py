"""Error replies of a server, as text with a way out."""

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
"""Types of the client for error replies; some derive from those of lost connections."""
_NO_PLACE = "max number of clients reached"
"""Reply for which the client raises the error of a lost connection."""

_IN_SCRIPT = re.compile(r" script: (?:\S+, )?on @user_script:\d+\.?$")
"""Place in a script that a reply names; it is cut off, since it tells users nothing."""


class _Refusal(NamedTuple):
    """Kind of error reply, by its code, and by its type if the client has one."""

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
    """Return True if a server sent this error as a reply."""
    return isinstance(error, _REPLIES) or str(error).startswith(_NO_PLACE)


def reply_text(error: BaseException) -> str:
    """Return the error as text; a reply has its code, and its way out if one is known."""
    text = _IN_SCRIPT.sub("", str(error)).rstrip(".")
    for code, of_type, way_out in _KNOWN:
        # redis-py cuts the code off where it has a type for the error.
        begins = is_reply(error) and text.startswith(f"{code} ")
        if begins or (of_type is not None and isinstance(error, of_type)):
            return f"{text if begins else f'{code} {text}'}: {way_out}"
    return text
