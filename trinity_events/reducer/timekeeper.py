"""Clock of the leader: publishes timeouts as events, so that the fold needs no clock."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import anyio

from trinity_schemas import Event

from ..core.decisions.timeouts import Waiting, expired, lease_holders, overdue, waiting
from ..log import ORIGIN, EventLog, position
from .leader import LeaderPublisher
from .live_state import LiveState
from .policy import Policy

logger = logging.getLogger(__name__)

LONGEST_PAUSE = 1.0
"""Longest pause before a new lease or deadline is noticed, in seconds."""
# Seconds; a lease of milliseconds would else have the leader ask the server without a pause.
_SHORTEST = 0.02


class Timekeeper:
    """Task of the leader that watches leases and deadlines.

    It reads the server's clock only for a new commit. It publishes further events only after the
    fold has taken the last ones, so that no timeout is published twice.

    Args:
        log: The run's log.
        publisher: Publisher of the timeouts.
        policy: The deadline of a step, and how often leases are checked.
    """

    def __init__(self, log: EventLog, publisher: LeaderPublisher, policy: Policy) -> None:
        self._log = log
        self._publisher = publisher
        self._step_deadline = policy.step_deadline
        self._lease_check = policy.timeouts.lease_check

    async def leases(self, live: LiveState) -> None:
        """Expire each process without a heartbeat for its whole lease.

        A lease runs from the last heartbeat, or from the begin of this lead. Heartbeats before
        this lead are unknown, so their absence expires no process.
        """
        beats: dict[str, float] = {}
        while True:
            watched = lease_holders(live.state)
            now = anyio.current_time()
            ttls = await self._log.heartbeat_ttls(watched)
            for name, holder in watched.items():
                since = max(0.0, holder.lease - ttls.get(name, 0.0))
                # A lapsed key does not say when it was set. The beat seen last counts then, or the
                # first look.
                beats[name] = now - since if name in ttls else beats.get(name, now)
            # Ended processes go: a run may see any number of incarnations.
            beats = {name: beats[name] for name in watched}
            silent = {name for name in watched if now - beats[name] >= watched[name].lease}
            if not await self._publish_all(expired(live.state, silent), live):
                return
            # An expiry is noticed at most a third of the shortest lease late.
            period = min((holder.lease / 3 for holder in watched.values()), default=LONGEST_PAUSE)
            await anyio.sleep(max(_SHORTEST, min(period, self._lease_check)))

    async def deadlines(self, live: LiveState) -> None:
        """Fail each step that is incomplete at the deadline after its commit.

        The server's clock gives the age of a commit when this leader first sees it. From then on
        the local monotonic clock counts, which cannot be set.
        """
        ends: dict[Waiting, float] = {}
        while True:
            ends = await self._find_ends(waiting(live.state), ends)
            now = anyio.current_time()
            remaining = min(ends.values(), default=math.inf) - now
            if remaining <= 0:
                late = {commit for commit, end in ends.items() if end <= now}
                if not await self._publish_all(
                    overdue(live.state, late, self._step_deadline), live
                ):
                    return
            await anyio.sleep(min(max(_SHORTEST, remaining), LONGEST_PAUSE))

    async def _find_ends(
        self, commits: Sequence[Waiting], earlier_ends: Mapping[Waiting, float]
    ) -> dict[Waiting, float]:
        """Return the local time at which each commit is overdue; keep the earlier results."""
        ends = {commit: earlier_ends[commit] for commit in commits if commit in earlier_ends}
        if len(ends) < len(commits):
            server, ours = await self._log.now(), anyio.current_time()
            for commit in commits:
                # The server's clock may go back, but entry ids may not: an id can be ahead of it.
                age = max(0.0, (server - commit.committed_at) / 1000)
                ends.setdefault(commit, ours + self._step_deadline - age)
        return ends

    async def _publish_all(self, events: Sequence[Event], live: LiveState) -> bool:
        """Publish events and wait until they are folded; return False if another reducer leads."""
        last, epoch = ORIGIN, live.state.epoch
        for event in events:
            entry_id = await self._publisher.publish(event, live.state, epoch)
            if entry_id is None:
                return False
            last = entry_id
            logger.info("%s", event)
        await live.wait_until(lambda state: position(state.position) >= position(last))
        return True
