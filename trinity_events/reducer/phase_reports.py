"""Reports of a reducer's own seconds, as leader or standby, for the goodput of its run.

1. An epoch has its own producer, and its clock begins when the leader folds its opening: so the
   seconds of an epoch are its own.
2. Nothing is reported while no trainer lives: a reader dates the end of a killed run by its last
   entry. It takes the reducer to live until then, or until another one leads.
3. A standby folds nothing. It reports its age, of which a reader counts what is of the epoch.
"""

from __future__ import annotations

from contextlib import suppress

import anyio
import redis

from trinity_schemas import PhasesMeasured

from ..core import MonitorState
from ..diagnostics.phase_names import SHORTEST_PAUSE, STANDBY_ROLE, STANDING_BY, find_pause
from ..diagnostics.phases import PhaseClock
from ..errors import TrinityError
from ..log import AsyncPublisher, EventLog, RedisEventLog, new_producer
from ..log.retry import CONNECTION_ERRORS
from ..replay import current_state
from .leader import LeaderPublisher
from .live_state import LiveState

_LAST_WITHIN = 0.5
"""Seconds for a report of a standby: a failover waits for the last one."""
_FAULTS: tuple[type[Exception], ...] = (redis.RedisError, TrinityError, *CONNECTION_ERRORS)


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


class StandbyReporter:
    """Reporter of the seconds in which a reducer waits for the lead.

    Args:
        log: The run's log.
    """

    def __init__(self, log: RedisEventLog) -> None:
        self._log = log
        self._began = self._epoch_at = self._reported_at = anyio.current_time()
        self._publisher: AsyncPublisher | None = None
        """Publisher of the newest epoch that was reported; each epoch has its own producer."""

    async def run(self) -> None:
        """Report until it is cancelled, and once more then."""
        try:
            while True:
                # A shorter pause than that of reports: a short epoch has its reports, too.
                await anyio.sleep(SHORTEST_PAUSE)
                # The log may be away: the next report has everything again.
                with suppress(*_FAULTS):
                    await self._report_if_due()
        finally:
            # The standby ends or leads. A run that ended meanwhile has no later entry by this.
            is_recent = anyio.current_time() - self._reported_at <= 2 * self._pause
            with (
                anyio.CancelScope(shield=True),
                anyio.move_on_after(_LAST_WITHIN),
                suppress(*_FAULTS),
            ):
                if self._publisher is not None and is_recent:
                    await self._publisher.publish(self._measure(is_last=True))

    @property
    def _pause(self) -> float:
        # By its age in the epoch, from which a reader knows when the next report is due.
        return find_pause(anyio.current_time() - self._epoch_at)

    async def _report_if_due(self) -> None:
        epoch = await self._log.newest_epoch()
        is_new = self._publisher is None or self._publisher.epoch != epoch
        if not is_new and anyio.current_time() - self._reported_at < self._pause:
            return
        state = await current_state(self._log)
        if state.epoch != epoch or not _is_trained(state):
            return
        if is_new:
            producer = new_producer(STANDBY_ROLE)
            self._publisher = AsyncPublisher(self._log, epoch, producer, deadline=_LAST_WITHIN)
            self._epoch_at = anyio.current_time()
        assert self._publisher is not None
        await self._publisher.publish(self._measure())
        self._reported_at = anyio.current_time()

    def _measure(self, *, is_last: bool = False) -> PhasesMeasured:
        age = anyio.current_time() - self._began
        return PhasesMeasured(seconds={STANDING_BY: age}, phase=STANDING_BY, is_last=is_last)


def _is_trained(state: MonitorState) -> bool:
    lease = state.trainer_lease
    return state.closed is None and lease is not None and lease.silent_at is None
