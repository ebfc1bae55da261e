"""Counter of epochs on the server, which must not fall behind the epochs in the log.

A trainer takes the next epoch from the counter and appends the opening, in one script. A client
that may append events can append an opening of any epoch without the counter. The fold then refuses
each opening that the counter gives as stale, until the counter has passed the invented epoch. Only
the reducer knows the folded epoch, and has the right to set the counter.
"""

from __future__ import annotations

import logging

from ..log import EventLog
from .live_state import LiveState

logger = logging.getLogger(__name__)


class EpochCounter:
    """Task of the leader that raises the counter to the newest folded epoch.

    Args:
        log: The run's log.
        token: Fencing token of the lead.
    """

    def __init__(self, log: EventLog, token: int) -> None:
        self._log = log
        self._token = token

    async def run(self, live: LiveState) -> None:
        """Raise the counter now, and with each new epoch, until another reducer leads."""
        raised = 0
        while True:
            await live.wait_until(lambda state, raised=raised: state.epoch > raised)  # type: ignore[misc]
            raised = live.state.epoch
            counted = await self._log.raise_epoch(self._token, raised)
            if counted is None:
                return
            if counted < raised:
                logger.warning(
                    "an event opened epoch %d of run %s, and the last number that a trainer took "
                    "was %d: the next opening takes %d; docs/security.md says who can append",
                    raised,
                    live.state.run_id,
                    counted,
                    raised + 1,
                )
