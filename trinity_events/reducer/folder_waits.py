"""Waits of the leader for a folder that it cannot write, as events of the log."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import anyio
from msgspec import Struct

from trinity_schemas import Event, WaitEnded, WaitStarted

from ..diagnostics.waits import RENEWAL
from .leader import LeaderPublisher
from .live_state import LiveState

CHECK_EVERY = 1.0
"""Seconds between two checks for what failed."""
_LONGEST = 500
"""Maximum characters of the object of a wait."""


class _ReportedWait(Struct):
    wait_id: str
    what: str
    since: float
    due: float


class FolderWaits:
    """Task of the leader that reports files which it cannot write, until it can.

    A file is reported at its second failed attempt, so that a short fault is no event.

    Args:
        publisher: Publisher of the leader's own events.
        faults: Returns what cannot be written now, each with the error in words.
    """

    def __init__(self, publisher: LeaderPublisher, faults: Callable[[], Mapping[str, str]]) -> None:
        self._publisher = publisher
        self._faults = faults

    async def run(self, live: LiveState) -> None:
        """Report until another reducer leads."""
        reports: dict[str, _ReportedWait] = {}
        epoch = live.state.epoch
        while True:
            if live.state.epoch != epoch:  # it forgets all waits
                reports, epoch = {}, live.state.epoch
            events = self._changes(reports, anyio.current_time())
            # The end of a run forgets its waits in the fold, and a report would open one again.
            for event in events if live.state.closed is None else ():
                if await self._publisher.publish(event, live.state, epoch) is None:
                    return
            await anyio.sleep(CHECK_EVERY)

    def _changes(self, reports: dict[str, _ReportedWait], now: float) -> list[Event]:
        """Return the reports that are due, and note them."""
        faults, events = dict(self._faults()), list[Event]()
        for name in [name for name in reports if name not in faults]:
            gone = reports.pop(name)
            # Empty until the first report: a fault that ended before it leaves no event.
            if gone.what:
                seconds = now - gone.since
                events.append(WaitEnded(wait_id=gone.wait_id, outcome="over", seconds=seconds))
        for name, why in faults.items():
            what = f"{name} to be written ({why})"[:_LONGEST]
            if name not in reports:
                reports[name] = _ReportedWait(secrets.token_hex(8), "", now, now + CHECK_EVERY)
            report = reports[name]
            if now >= report.due:
                report.what, report.due = what, now + RENEWAL
                events.append(
                    WaitStarted(wait_id=report.wait_id, what=what, seconds=now - report.since)
                )
        return events
