"""Seconds of the embedded servers that a run's launcher starts, for the goodput of the run.

A server that a user names serves others too, so that its seconds are not those of the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import anyio

from trinity_events.diagnostics.phase_names import (
    CHUNK_SERVER_ROLE,
    LOG_SERVER_ROLE,
    SERVING,
    find_pause,
)
from trinity_events.diagnostics.phases import PhaseClock
from trinity_events.errors import TrinityError
from trinity_events.log import AsyncPublisher, EventLog, new_producer
from trinity_events.server import (
    LOG_SERVER,
    WEIGHTS_SERVER,
    EmbeddedServer,
    serving,
    serving_weights,
    trinity_home,
)

from ..config.train_config import RunConfig

_SERVERS = {
    LOG_SERVER_ROLE: (LOG_SERVER, "redis"),
    CHUNK_SERVER_ROLE: (WEIGHTS_SERVER, "weights"),
}
"""Role of a server to the setting that names another one, and to its folder in the home."""


class ServerPhases:
    """Clocks of the embedded servers of a run, each from the time at which the run uses it."""

    def __init__(self) -> None:
        self._clocks: dict[str, PhaseClock] = {}
        """Clock of each server by its role."""

    @contextmanager
    def serving(self, redis_url: str | None, weights_url: str | None) -> Iterator[tuple[str, str]]:
        """Yield the URLs of the log's server and of the chunk server; embedded ones are started."""
        with (
            self._measuring(LOG_SERVER_ROLE, serving(redis_url), redis_url) as log,
            self._measuring(
                CHUNK_SERVER_ROLE, serving_weights(weights_url, log), weights_url
            ) as chunks,
        ):
            yield log, chunks

    @contextmanager
    def _measuring(
        self, role: str, server: AbstractContextManager[str], named: str | None
    ) -> Iterator[str]:
        """Enter the block of a server, and measure the server if it is an embedded one."""
        clock = PhaseClock(SERVING)
        with server as url:
            clock.end_start()
            setting, folder = _SERVERS[role]
            is_named = bool(named or os.environ.get(setting.variable))
            # The chunks may go to the log's server, which is measured already.
            if not is_named and url == EmbeddedServer(trinity_home(), folder).url:
                self._clocks[role] = clock
            yield url

    async def report(self, log: EventLog, config: RunConfig) -> None:
        """Report until cancelled; readers take a server to serve until the epoch's end."""
        publishers = {
            role: AsyncPublisher(
                log, config.epoch, new_producer(role), deadline=config.sync.timeout
            )
            for role in self._clocks
        }
        while publishers:
            for role, publisher in publishers.items():
                # The next report has everything again.
                with suppress(TrinityError):
                    await publisher.publish(self._clocks[role].report())
            await anyio.sleep(find_pause(min(clock.age for clock in self._clocks.values())))
