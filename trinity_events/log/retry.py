"""Which errors of a client pass by waiting, and for how long to wait."""

from __future__ import annotations

import random
from collections.abc import Iterator

import redis
import redis.exceptions as of_redis

from ..errors import LogExhausted

_SHORTEST = 0.05

CONNECTION_ERRORS: tuple[type[Exception], ...] = (
    redis.ConnectionError,  # a server that is loading or has no place for us is one, too
    redis.TimeoutError,
    redis.ReadOnlyError,
    redis.OutOfMemoryError,
    of_redis.MasterDownError,
    of_redis.ClusterDownError,
    of_redis.TryAgainError,
    of_redis.MovedError,
    of_redis.AskError,
    of_redis.RedisClusterException,  # none of a cluster's nodes answers
    OSError,
)
"""What says that the server could not be asked, or cannot take anything now.

Errors of authentication are among them by their base class alone: ask :func:`is_transient`.
"""

_REFUSED = (redis.AuthenticationError, of_redis.AuthorizationError)
_PASSING = ("MISCONF", "NOREPLICAS", "BUSY ", "LOADING", "MASTERDOWN")
"""Answers that clients have no type for: a full disk, too few replicas, a script that runs."""


def is_transient(error: BaseException) -> bool:
    """Whether to try again later may help; else the server has refused for good."""
    if isinstance(error, _REFUSED):
        return False
    if isinstance(error, (*CONNECTION_ERRORS, LogExhausted)):
        return True
    return isinstance(error, redis.ResponseError) and str(error).startswith(_PASSING)


def backoff_delays(most: float) -> Iterator[float]:
    """Seconds to wait before each further attempt, without end.

    Drawn from the whole of a span that doubles from 50 ms to ``most``, so that those who lost
    the server at one moment do not all come back at one moment.
    """
    span = min(_SHORTEST, most)
    while True:
        yield random.uniform(0, span)  # noqa: S311
        span = min(2 * span, most)
