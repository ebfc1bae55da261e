"""``trinity-events watch``."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import anyio

from ..analysis.causes import LiveFacts
from ..errors import PackageMissing, TrinityError
from ..live_facts import read_lags
from ..log import DeadLetter, RedisEventLog, require_run
from ..replay import follow_state
from ..server import server_clock
from .options import OptionalRun, RedisUrl, open_client

if TYPE_CHECKING:
    from ..views.watch import WatchApp


class CannotWatch(TrinityError):
    """There is no terminal."""

    def __str__(self) -> str:
        return "watch needs a terminal: elsewhere use status, or tail --follow"


def watch(run: OptionalRun = None, redis_url: RedisUrl = None) -> None:
    """Watch a run in a full-screen terminal view: state, waits, saves, explorers, lags, events.

    Keys: q quits, space holds the screen still, e shows or hides the events. It only reads.

    Example: trinity-events watch demo-1
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CannotWatch
    try:
        from ..views.watch import WatchApp
    except ImportError:
        raise PackageMissing("watch", "textual", "trinity-events[watch]") from None
    anyio.run(_watch, WatchApp, redis_url, run)


async def _watch(app: type[WatchApp], redis_url: str | None, run: str | None) -> None:
    async with open_client(redis_url) as client:
        log = RedisEventLog(client, await require_run(client, run))
        ahead = await server_clock(client, log.keys.events) - time.time() * 1000

        async def read_panel() -> tuple[LiveFacts, list[DeadLetter]]:
            return await read_lags(client, log), await log.dead_letters(last=1)

        await app(log.run_id, partial(follow_state, log), ahead, read_panel).run_async()
