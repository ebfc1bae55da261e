"""Deadline of a wait, which retries while the server is away."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import redis

from ..errors import DeadlineExceeded
from ..log.redis.error_replies import is_reply, reply_text
from ..log.retry import backoff_delays, is_transient
from .acl_errors import permission_error

T = TypeVar("T")

LONGEST_PAUSE = 2.0
"""Maximum seconds between two attempts to reach a server."""
_GRACE = 1.0
"""Seconds beyond the deadline in which a server may still answer that nothing came."""

logger = logging.getLogger(__name__)


class Deadline:
    """Deadline for each of several successive waits.

    Args:
        deadline: Seconds for each wait; None waits forever.
        missing: Text of the error after the deadline; callers may change it as they know more.
        advice: Text added to the error if the server answers.
    """

    def __init__(self, deadline: float | None, missing: str, advice: str = "") -> None:
        self._deadline = math.inf if deadline is None else deadline
        self.missing = missing
        self._advice = advice
        self.faults = 0
        """Number of failed requests to the server."""
        self.renew()

    def renew(self) -> None:
        """Restart the deadline for the next wait."""
        self._give_up = anyio.current_time() + self._deadline
        # A fault before belongs to the wait before.
        self._fault: BaseException | None = None

    def left(self) -> float:
        """Return the seconds left. Raises DeadlineExceeded if there are none."""
        remaining = self._give_up - anyio.current_time()
        if remaining <= 0:
            raise DeadlineExceeded(
                self.missing, self._deadline, self.format_fault() or self._advice
            )
        return remaining

    def format_fault(self) -> str:
        """Return the last connection error as a clause; empty without one."""
        if self._fault is None:
            return ""
        verb = "refuses" if is_reply(self._fault) else "does not answer"
        return f"the server {verb} ({reply_text(self._fault)})"

    def is_refused_by(self, kind: type[redis.RedisError]) -> bool:
        """Return True if the last error of the server is of a kind."""
        return isinstance(self._fault, kind)

    async def retry(self, question: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of a server; retry while the server is away."""
        pause = backoff_delays(LONGEST_PAUSE)
        while True:
            try:
                # A server that accepts and never answers must not outlast the deadline.
                with anyio.fail_after(self.left() + _GRACE):
                    answer = await question()
            except Exception as error:
                if not is_transient(error):
                    raise (permission_error(error) or error) from None
                self._record_fault(error)
            else:
                self._fault = None
                return answer
            # left() raises at the deadline, so that the loop needs no other end.
            await anyio.sleep(min(next(pause), self.left()))

    def _record_fault(self, fault: BaseException) -> None:
        # Logged once for an outage, not at each attempt.
        if self._fault is None:
            logger.warning(
                "waiting for the server (%s): %s so far", reply_text(fault), self.missing
            )
        self._fault = fault
        self.faults += 1
