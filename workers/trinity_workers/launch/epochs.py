"""Follower of a run's epochs, by which a process elsewhere finds the run that it serves."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import anyio
from msgspec import Struct

from trinity_events.errors import RunNotFound, TrinityError
from trinity_schemas import EpochClosed, EpochOpened

from ..explorer.run_follower import Followed, RunFollower


class Opening(Struct, frozen=True, kw_only=True):
    """Opening of one epoch of a run."""

    epoch: int
    config: str | None
    """The run's settings, as JSON."""


class EpochNotAnnounced(TrinityError):
    """A run is open, and no announcement says so: its trainer or reducer is of an older version."""

    run_id: str
    epoch: int
    seconds: float
    text = (
        "run {run_id} is in epoch {epoch}, and its opening was not announced within {seconds:g} s: "
        "is its reducer running? A trainer or a reducer older than this explorer announces none: "
        "use one version of trinity-events for all three"
    )


class EpochFollower:
    """Epochs of a run: the newest, and how it was closed.

    Args:
        run: Follower of the run.
    """

    def __init__(self, run: RunFollower) -> None:
        self._run = run
        self._changed = anyio.Condition()
        self._newest: Opening | None = None
        self._closed: EpochClosed | None = None

    def listening(self) -> AbstractAsyncContextManager[None]:
        """Listen to the run's announcements for the block."""
        return self._run.listening(self._hear)

    async def _hear(self, announcement: Followed) -> None:
        epoch = self._newest.epoch if self._newest else 0
        async with self._changed:
            match announcement:
                case EpochOpened(epoch=opened, config=config) if opened > epoch:
                    self._newest, self._closed = Opening(epoch=opened, config=config), None
                case EpochClosed() as closed if closed.epoch == epoch:
                    self._closed = closed
            self._changed.notify_all()

    async def opened(self, deadline: float) -> Opening | EpochClosed:
        """Return the newest epoch once it is open; how it was closed if none is opened in time.

        Raises:
            RunNotFound: when the run is never opened.
            EpochNotAnnounced: when the run was opened by an older version.
        """
        with anyio.move_on_after(deadline):
            async with self._changed:
                # A closed epoch is the newest one until the run is opened again.
                while self._newest is None or self._closed is not None:
                    await self._changed.wait()
                return self._newest
        if self._closed is not None:
            return self._closed
        log, why = self._run.log, self._run.fault()
        if not why:
            epoch = await log.newest_epoch()
            if epoch:
                raise EpochNotAnnounced(log.run_id, epoch, deadline)
            why = "is its trainer running, on this server and under this name?"
        raise RunNotFound(log.run_id, "not opened", way_out=why, deadline=deadline)

    async def ended(self, opening: Opening) -> EpochClosed | None:
        """Wait until the epoch is closed; None when another has taken its place before."""
        async with self._changed:
            while self._closed is None and self._newest == opening:
                await self._changed.wait()
            return self._closed if self._newest == opening else None
