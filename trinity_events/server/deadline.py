"""A deadline, and what is done when the server cannot be asked meanwhile."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from ..errors import DeadlineExceeded
from ..log.error_replies import is_reply, reply_text
from ..log.retry import backoff_delays, is_transient
from .acl_errors import permission_error

T = TypeVar("T")

LONGEST_PAUSE = 2.0
"""Seconds between two attempts to reach a server, at most."""
_GRACE = 1.0
"""Seconds that a server has beyond the deadline to say that nothing came."""

logger = logging.getLogger(__name__)


class Deadline:
    """Waits for one thing after another, each within the deadline.

    Args:
        deadline: Seconds for each; None waits as long as it takes.
        missing: What to say when it passes. It may be changed when more is known.
        advice: What to look at then, where the server answers.
    """

    def __init__(self, deadline: float | None, missing: str, advice: str = "") -> None:
        self._deadline = math.inf if deadline is None else deadline
        self.missing = missing
        self._advice = f": {advice}" if advice else ""
        self.faults = 0
        """How often the server could not be asked."""
        self.renew()

    def renew(self) -> None:
        """Begin anew: what was waited for came."""
        self._give_up = anyio.current_time() + self._deadline
        self._fault: BaseException | None = None

    def left(self) -> float:
        """Seconds to wait at most. Raises DeadlineExceeded when there are none."""
        left = self._give_up - anyio.current_time()
        if left <= 0:
            why = self.why() or self._advice
            raise DeadlineExceeded(f"{self.missing} within {self._deadline:g} s{why}")
        return left

    def why(self) -> str:
        """Return why the server could not be asked, to be added to a sentence.

        Empty where it could.
        """
        if self._fault is None:
            return ""
        verb = "refuses" if is_reply(self._fault) else "does not answer"
        return f": the server {verb} ({reply_text(self._fault)})"

    async def ask(self, question: Callable[[], Awaitable[T]]) -> T:
        """The answer of a server, which is waited for while it is not there."""
        pause = backoff_delays(LONGEST_PAUSE)
        while True:
            try:
                with anyio.fail_after(self.left() + _GRACE):
                    answer = await question()
            except Exception as error:
                if not is_transient(error):
                    raise (permission_error(error) or error) from None
                self._note(error)
            else:
                self._fault = None
                return answer
            await anyio.sleep(min(next(pause), self.left()))

    def _note(self, fault: BaseException) -> None:
        if self._fault is None:
            logger.warning(
                "waiting for the server (%s): %s so far", reply_text(fault), self.missing
            )
        self._fault = fault
        self.faults += 1
