"""Transient errors of a client, and the delays between retries."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import TypeVar

import anyio.from_thread
import redis
import redis.exceptions as of_redis

from ..errors import EpochBehind, LogExhausted, ServerRefuses, ServerUnreachable

T = TypeVar("T")

_SHORTEST = 0.05
_LONGEST = 1.0
"""Maximum seconds between two attempts of :func:`retry_for`."""

JITTER = Random()  # noqa: S311 - of delays
"""Source of all random delays.

The global generator of ``random`` belongs to the user's code: an outage would otherwise change
what a training program with a seed draws, and the threads of this package would race with it.
"""
# Ranks that were forked from one process would otherwise all retry at the same moments.
os.register_at_fork(after_in_child=JITTER.seed)

SLOW = "it is slow"
"""Reason of a wait for a server that has not failed."""
CONNECTION_ERRORS: tuple[type[Exception], ...] = (
    redis.ConnectionError,  # includes a server that is loading or has no free connection
    redis.TimeoutError,
    redis.ReadOnlyError,
    redis.OutOfMemoryError,
    of_redis.MasterDownError,
    of_redis.ClusterDownError,
    of_redis.TryAgainError,
    of_redis.MovedError,
    of_redis.AskError,
    of_redis.RedisClusterException,  # no node of the cluster answers
    OSError,
)
"""Errors of a server that could not be reached, or cannot take writes now.

Authentication errors are included by their base class alone: ask :func:`is_transient`.
"""

_REFUSED = (redis.AuthenticationError, of_redis.AuthorizationError)
_PASSING = ("MISCONF", "NOREPLICAS", "BUSY ", "LOADING", "MASTERDOWN")
"""Reply codes without a type in the client: a full disk, too few replicas, a running script."""


def is_transient(error: BaseException) -> bool:
    """Return True if a later retry may help; False if the server refuses for good."""
    if isinstance(error, _REFUSED):
        return False
    if isinstance(error, (*CONNECTION_ERRORS, EpochBehind, LogExhausted)):
        return True
    if type(error) in (ServerUnreachable, ServerRefuses):  # its other subclasses stay as they are
        return True
    return isinstance(error, redis.ResponseError) and str(error).startswith(_PASSING)


def draw_delay(span: float) -> float:
    """Return random seconds to wait, at most a span."""
    # Full jitter: each delay is drawn from the whole span (AWS Architecture Blog, "Exponential
    # Backoff And Jitter").
    return JITTER.uniform(0, span)


def backoff_delays(most: float) -> Iterator[float]:
    """Yield the seconds to wait before each further attempt, without end.

    Each delay is random within a span that doubles from 50 ms to ``most`` seconds. Clients that
    lost the server at one moment thus do not all return at one moment.
    """
    span = min(_SHORTEST, most)
    while True:
        yield draw_delay(span)
        span = min(2 * span, most)


def retry_for(
    seconds: float,
    call: Callable[[], T],
    *,
    on_first_error: Callable[[Exception], None] | None = None,
) -> T:
    """Return the result of a request, repeated for some seconds while its error is transient.

    In a thread that a task waits for, the retries end once that task is cancelled.

    Args:
        seconds: Seconds after which the error of an attempt is raised.
        call: Sends the request.
        on_first_error: Receives the error of the first attempt, if it is repeated.
    """
    give_up = time.monotonic() + seconds
    for attempt, pause in enumerate(backoff_delays(_LONGEST)):
        try:
            return call()
        except Exception as error:
            remaining = give_up - time.monotonic()
            if remaining <= 0 or not is_transient(error):
                raise
            if attempt == 0 and on_first_error is not None:
                on_first_error(error)
        check_cancelled()
        time.sleep(min(pause, remaining))
    # The generator has no end; without this line the function could return None.
    raise AssertionError("backoff_delays ended")


def check_cancelled() -> None:
    """End the call of this thread if the task that waits for it was cancelled."""
    with suppress(RuntimeError):  # no task waits for this thread
        anyio.from_thread.check_cancelled()
