"""Requests to a server of chunks, which wait while it is away.

1. Each request waits for the deadline of its process, in addition to the client's own attempts.
2. A wait is logged at its first error, and reported as a wait for the server.
3. A chunk that was received stays: after an outage a reader continues with the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from ....diagnostics.waits import NO_REPORTS, WaitReporter
from ....errors import DeadlineExceeded
from ....log.redis.error_replies import is_reply, reply_text
from ....log.retry import is_transient, retry_for
from ....server import address_of

T = TypeVar("T")

logger = logging.getLogger(__name__)


class ChunkServer:
    """Server of the chunks, as one process sends requests to it.

    Args:
        client: Client of the server.
        deadline: Seconds for which a request waits for a server that is away or full.
        waits: Returns the reporter of the process's long waits.
    """

    def __init__(
        self,
        client: Any,
        deadline: float = 0.0,
        waits: Callable[[], WaitReporter] = lambda: NO_REPORTS,
    ) -> None:
        self.client = client
        self._deadline = deadline
        self._waits = waits

    def request(self, call: Callable[[], T]) -> T:
        """Return the answer to a request; raise the client's error after the deadline."""
        with ExitStack() as waiting:

            def report(error: Exception) -> None:
                server = f"the chunk server at {address_of(self.client)}"
                logger.warning(
                    "waiting up to %g s for %s: %s", self._deadline, server, reply_text(error)
                )
                waiting.enter_context(self._waits().waiting(server, deadline=self._deadline))

            return retry_for(self._deadline, call, on_first_error=report)

    def read(self, missing: str, call: Callable[[], T]) -> T:
        """Return the answer to a request of a reader.

        Args:
            missing: What was not read, as a clause.
            call: Sends the request.

        Raises:
            DeadlineExceeded: The server stayed away.
        """
        try:
            return self.request(call)
        except Exception as error:
            if not is_transient(error):
                raise
            verb = "refuses" if is_reply(error) else "does not answer"
            reason = f"the chunk server at {address_of(self.client)} {verb} ({reply_text(error)})"
            raise DeadlineExceeded(missing, self._deadline, reason) from error
