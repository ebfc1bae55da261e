"""The leader's clock: tells the log that time has passed, so that the fold needs none."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio

from trinity_schemas import Event

from ..core.overdue import expired, holders, next_deadline, overdue
from ..log import ORIGIN, EventLog, position
from .leader import LeadersVoice
from .live import Live

logger = logging.getLogger(__name__)

LOOK = 1.0
"""Seconds within which it is noticed that there is something new to wait for."""
_SHORTEST = 0.02
_LONGEST = 5.0
_SERVER_CLOCK_HOLDS = 60.0
"""Seconds for which the server's clock is carried on by ours, before it is asked again."""


class Timekeeper:
    """Watches over leases and deadlines while its reducer leads.

    It asks the server only when something may be due, and says nothing new before what it said
    last is folded, so that nothing is told twice.

    Args:
        log: The run's log.
        voice: Says what became due.
        step_deadline: Seconds from a step's commit until it fails with what it lacks.
    """

    def __init__(self, log: EventLog, voice: LeadersVoice, step_deadline: float) -> None:
        self._log = log
        self._voice = voice
        self._step_deadline = step_deadline
        self._clock: tuple[float, int] | None = None

    async def leases(self, live: Live) -> None:
        """Expire whoever was silent for its whole lease, since we saw it or since we lead.

        What the heartbeats were before we led is not known: nobody is expired for it.
        """
        seen: dict[str, float] = {}
        while True:
            watched = holders(live.state)
            now = anyio.current_time()
            alive = await self._log.alive(watched)
            seen = {name: now if name in alive else seen.get(name, now) for name in watched}
            silent = {name for name in watched if now - seen[name] >= watched[name].lease}
            if not await self._tell(expired(live.state, silent), live):
                return
            period = min((holder.lease / 3 for holder in watched.values()), default=LOOK)
            await anyio.sleep(max(_SHORTEST, min(period, _LONGEST)))

    async def deadlines(self, live: Live) -> None:
        """Fail what is incomplete for too long after its commit."""
        while True:
            due = next_deadline(live.state, self._step_deadline)
            left = LOOK if due is None else (due - await self._server_time()) / 1000
            if left <= 0:
                now = await self._log.now()
                late = overdue(live.state, now, self._step_deadline)
                if not await self._tell(late, live):
                    return
            await anyio.sleep(min(max(_SHORTEST, left), LOOK))

    async def _server_time(self) -> int:
        """The server's clock: asked now and then, and carried on by ours in between."""
        ours = anyio.current_time()
        if self._clock is None or ours - self._clock[0] > _SERVER_CLOCK_HOLDS:
            self._clock = ours, await self._log.now()
        asked_at, answer = self._clock
        return answer + int((ours - asked_at) * 1000)

    async def _tell(self, events: Sequence[Event], live: Live) -> bool:
        """Say it, and wait until it is folded. False when another leads."""
        last, epoch = ORIGIN, live.state.epoch
        for event in events:
            said = await self._voice.say(event, live.state, epoch)
            if said is None:
                return False
            last = said
            logger.info("%s", event)
        await live.until(lambda state: position(state.position) >= position(last))
        return True
