"""``trinity-events watch``."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from threading import Thread, Timer
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


_ENDS_WITHIN = 3.0
"""Seconds for an orderly end once the terminal is gone: that takes less than one."""


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
        # Ages are shown by the server's clock, which stamps the entries.
        ahead = await server_clock(client, log.keys.events) - time.time() * 1000

        async def read_panel() -> tuple[LiveFacts, list[DeadLetter]]:
            return await read_lags(client, log), await log.dead_letters(last=1)

        screen = app(log.run_id, partial(follow_state, log), ahead, read_panel)
        # A daemon, as it waits for the terminal's end, which may be long after the view's.
        Thread(target=_exit_with_terminal, args=(screen,), name="terminal", daemon=True).start()
        await screen.run_async()


def _exit_with_terminal(screen: WatchApp) -> None:
    """Wait until the terminal is gone, and end the view.

    SIGHUP does not do that where a shell or nohup ignores it, nor in a terminal that does not
    control the session: textual then reads an end of file again and again, at full speed.
    """
    terminal = select.poll()
    terminal.register(sys.stdin.fileno(), 0)  # a hang-up is reported whatever is asked for
    outputs = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
    terminal.poll()
    # What is written from now on would fail, at last the interpreter's own flush (status 120).
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in outputs:
        os.dup2(nowhere, descriptor)
    # SIGHUP may have ended the view in the middle of a step that does not survive it. Nothing is
    # lost: the command only reads, and no terminal is left to be restored.
    end = Timer(_ENDS_WITHIN, os._exit, (128 + signal.SIGHUP,))
    end.daemon = True
    end.start()
    with suppress(RuntimeError):  # it ends already
        screen.call_from_thread(screen.exit)
