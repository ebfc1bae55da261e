"""The leader's clock: tells the log that time has passed, so that the fold needs none."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import anyio

from trinity_schemas import Event

from ..core.timeouts import Waiting, expired, lease_holders, overdue, waiting
from ..log import ORIGIN, EventLog, position
from .leader import LeaderPublisher
from .live_state import LiveState

logger = logging.getLogger(__name__)

LOOK = 1.0
"""Seconds within which it is noticed that there is something new to wait for."""
_SHORTEST = 0.02
_LONGEST = 5.0


class Timekeeper:
    """Watches over leases and deadlines while its reducer leads.

    It asks for the server's clock only when there is something new to wait for, and says nothing
    new before what it said last is folded, so that nothing is told twice.

    Args:
        log: The run's log.
        voice: Says what became due.
        step_deadline: Seconds from a step's commit until it fails with what it lacks.
    """

    def __init__(self, log: EventLog, voice: LeaderPublisher, step_deadline: float) -> None:
        self._log = log
        self._voice = voice
        self._step_deadline = step_deadline

    async def leases(self, live: LiveState) -> None:
        """Expire whoever was silent for its whole lease, since its last beat or since we lead.

        What the heartbeats were before we led is not known: nobody is expired for it.
        """
        beats: dict[str, float] = {}
        while True:
            watched = lease_holders(live.state)
            now = anyio.current_time()
            left = await self._log.heartbeat_ttls(watched)
            for name, holder in watched.items():
                since = max(0.0, holder.lease - left.get(name, 0.0))
                beats[name] = now - since if name in left else beats.get(name, now)
            beats = {name: beats[name] for name in watched}
            silent = {name for name in watched if now - beats[name] >= watched[name].lease}
            if not await self._tell(expired(live.state, silent), live):
                return
            period = min((holder.lease / 3 for holder in watched.values()), default=LOOK)
            await anyio.sleep(max(_SHORTEST, min(period, _LONGEST)))

    async def deadlines(self, live: LiveState) -> None:
        """Fail what is incomplete for too long after its commit.

        How old a commit is when we first see it, the server's clock says; from then on ours
        does, which nobody sets.
        """
        ends: dict[Waiting, float] = {}
        while True:
            ends = await self._ends(waiting(live.state), ends)
            now = anyio.current_time()
            left = min(ends.values(), default=math.inf) - now
            if left <= 0:
                late = {one for one, end in ends.items() if end <= now}
                if not await self._tell(overdue(live.state, late, self._step_deadline), live):
                    return
            await anyio.sleep(min(max(_SHORTEST, left), LOOK))

    async def _ends(
        self, commits: Sequence[Waiting], known: Mapping[Waiting, float]
    ) -> dict[Waiting, float]:
        """When each of them is overdue by our clock, of which some are known."""
        ends = {one: known[one] for one in commits if one in known}
        if len(ends) < len(commits):
            server, ours = await self._log.now(), anyio.current_time()
            for one in commits:
                # Entry ids never go back, but the server's clock may: then they are ahead of it.
                age = max(0.0, (server - one.committed_at) / 1000)
                ends.setdefault(one, ours + self._step_deadline - age)
        return ends

    async def _tell(self, events: Sequence[Event], live: LiveState) -> bool:
        """Say it, and wait until it is folded. False when another leads."""
        last, epoch = ORIGIN, live.state.epoch
        for event in events:
            said = await self._voice.publish(event, live.state, epoch)
            if said is None:
                return False
            last = said
            logger.info("%s", event)
        await live.wait_until(lambda state: position(state.position) >= position(last))
        return True
