"""Explorers of a run's own Ray cluster, each started again when its process or engine dies."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import anyio

from ..rollout_engines import EngineEnded
from .actors import ActorDied, Actors
from .cluster import Notify

MOST_RESTARTS = 3
"""Maximum restarts in a row of an explorer that dies soon: what kills it would kill it again."""
SETTLED = 60.0
"""Seconds of work after which an explorer's earlier deaths are forgotten, by default."""


async def explore_to_the_end(
    actors: Actors,
    name: str,
    start: Callable[[int], Any],
    notify: Notify,
    *,
    settled: float = SETTLED,
) -> None:
    """Let a prepared explorer answer to the end of the run, and start it again when it dies.

    It is started again too when a process of its engine has ended. Its claims lapse meanwhile, and
    the other explorers answer them.

    Args:
        actors: The run's actors.
        name: The explorer.
        start: Starts an actor in its place, given the number of the restart.
        notify: Shows a line to the user.
        settled: Seconds of work after which earlier deaths are forgotten.

    Raises:
        ActorDied: if it died soon after each of its restarts.
        EngineEnded: if its engine did.
    """
    deaths = 0
    for restart in count():
        began = anyio.current_time()
        try:
            # The launcher has prepared the first actor together with the others.
            if restart:
                await actors.replace(name, start(restart))
                await actors.call(name, "prepare")
            await actors.call(name, "explore")
            return
        except (ActorDied, EngineEnded) as error:
            deaths = 1 if anyio.current_time() - began >= settled else deaths + 1
            if deaths > MOST_RESTARTS:
                raise
            notify(f"warning: {error}: it is started again (restart {deaths} of {MOST_RESTARTS})")
