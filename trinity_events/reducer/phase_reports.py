"""Reports of the leader's own seconds, for the goodput of its run.

1. An epoch has its own producer, and its clock begins when the leader folds its opening: so the
   seconds of an epoch are its own.
2. Nothing is reported while no trainer lives: a reader dates the end of a killed run by its last
   entry. It takes the reducer to live until then, or until another one leads.
"""

from __future__ import annotations

import anyio

from ..core import MonitorState
from ..diagnostics.phases import PhaseClock, find_pause
from ..log import EventLog
from .leader import LeaderPublisher
from .live_state import LiveState


class PhaseReporter:
    """Reporter of the seconds in which one lead folds, and of those in which it waits.

    Args:
        log: The run's log.
        token: Fencing token of the lead.
    """

    def __init__(self, log: EventLog, token: int) -> None:
        self._log, self._token = log, token
        self.clock = PhaseClock()
        """Clock of the present epoch, which the fold of the lead drives."""
        self.clock.end_start()

    async def run(self, live: LiveState) -> None:
        """Report until another reducer leads."""
        epoch = 0

        def is_later(state: MonitorState) -> bool:
            return state.epoch > epoch

        def is_due(state: MonitorState) -> bool:
            return is_later(state) or _is_trained(state)

        while True:
            await live.wait_until(is_later)
            epoch = live.state.epoch
            publisher = LeaderPublisher(self._log, self._token)
            self.clock.restart()
            while not is_later(live.state):
                await live.wait_until(is_due)
                if is_later(live.state):
                    break
                # Without cores: it computes nothing of the training.
                report = self.clock.report(cores=0)
                if await publisher.publish(report, live.state, epoch) is None:
                    return
                with anyio.move_on_after(find_pause(self.clock.age)):
                    await live.wait_until(is_later)


def _is_trained(state: MonitorState) -> bool:
    lease = state.trainer_lease
    return state.closed is None and lease is not None and lease.silent_at is None
