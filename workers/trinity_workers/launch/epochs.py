"""Follower of a run's epochs, by which a process elsewhere finds the run that it serves."""

from __future__ import annotations

from functools import partial

import anyio
from msgspec import Struct

from trinity_events.archive import Archive
from trinity_events.archive.export import whole_stream
from trinity_events.errors import RunNotFound
from trinity_events.log import ORIGIN, Entry, PageSize, RedisEventLog, Stream
from trinity_events.replay import PAGE
from trinity_events.server import Deadline
from trinity_schemas import ContractError, RunClosed, RunOpened, RunResumed, decode_envelope


class Opening(Struct, frozen=True, kw_only=True):
    """Opening of one epoch of a run."""

    epoch: int
    config: str | None
    """The run's settings, as JSON."""


class EpochFollower:
    """Follower of a run's epochs: the newest, and how it was closed.

    Args:
        log: The run's log.
        archive: Where its older entries are.
    """

    def __init__(self, log: RedisEventLog, archive: Archive) -> None:
        self._log = log
        self._archive = archive
        self._changed = anyio.Condition()
        self._newest: Opening | None = None
        self._closed: RunClosed | None = None
        self._wait = Deadline(None, f"the openings of run {log.run_id} are not known")

    async def follow(self) -> None:
        """Follow until cancelled; a server that is away is waited for."""
        # From the beginning again when that is broken off: an epoch that is known stays as it is.
        after, page = await self._wait.ask(self._read_all), PageSize(PAGE)
        while True:
            # Told here, so that what was read at first is taken as a whole.
            async with self._changed:
                self._changed.notify_all()
            ask = partial(
                self._log.read_blocking, {Stream.EVENTS: after}, seconds=5, limit=page.limit
            )
            found = [entry for _, entry in await self._wait.ask(ask)]
            page.learn(found)
            for entry in found:
                after = entry.id
                self._fold(entry)

    async def _read_all(self) -> str:
        """Fold all entries; return the position of the last one."""
        after = ORIGIN
        async for entry in whole_stream(self._log, Stream.EVENTS, self._archive):
            after = entry.id
            self._fold(entry)
        return after

    def _fold(self, entry: Entry) -> None:
        try:
            envelope = decode_envelope(entry.payload)
        except ContractError:
            return
        epoch = self._newest.epoch if self._newest else 0
        match envelope.event:
            case RunOpened(config=config) | RunResumed(config=config) if envelope.epoch > epoch:
                self._newest, self._closed = Opening(epoch=envelope.epoch, config=config), None
            case RunClosed() as closed if envelope.epoch == epoch:
                self._closed = closed

    async def opened(self, deadline: float) -> Opening | RunClosed:
        """Return the newest epoch once it is open; how it was closed if none is opened in time.

        Raises:
            RunNotFound: when the run is never opened.
        """
        with anyio.move_on_after(deadline):
            async with self._changed:
                while self._newest is None or self._closed is not None:
                    await self._changed.wait()
                return self._newest
        if self._closed is None:
            why = self._wait.why() or (
                ": is its trainer running, on this server and under this name?"
            )
            raise RunNotFound(f"run {self._log.run_id} was not opened within {deadline:g} s{why}")
        return self._closed

    async def ended(self, opening: Opening) -> RunClosed | None:
        """Wait until the epoch is closed; None when another has taken its place before."""
        async with self._changed:
            while self._closed is None and self._newest == opening:
                await self._changed.wait()
            return self._closed if self._newest == opening else None
