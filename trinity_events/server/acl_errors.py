"""Errors for requests that a server's access rules refuse."""

from __future__ import annotations

from typing import Literal

import redis
from redis.exceptions import AuthorizationError

from ..errors import PermissionDenied
from .url import redacted

_REFUSED = (redis.AuthenticationError, AuthorizationError, redis.exceptions.NoPermissionError)
_IN_SCRIPTS = ("NOPERM", "ACL failure in script", "The user executing the script can't")
"""Error replies to scripts, for which clients have no type; the last is that of Redis 7.0."""


def permission_error(error: BaseException, url: str | None = None) -> PermissionDenied | None:
    """Return the error for a missing permission of this user; None for any other error."""
    # The text is the only sign: inside of a script the server answers a plain error.
    if not isinstance(error, _REFUSED) and not (
        isinstance(error, redis.ResponseError) and any(text in str(error) for text in _IN_SCRIPTS)
    ):
        return None
    # Without its secrets: errors end up in logs and events.
    where = "the server" if url is None else f"the server at {redacted(url)}"
    fault: Literal["user", "command"] = "user" if isinstance(error, _REFUSED[:2]) else "command"
    return PermissionDenied(str(error), fault, where)
