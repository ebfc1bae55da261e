"""``trinity-events replay``."""

from __future__ import annotations

from typing import Annotated

import anyio
import typer
from rich.console import Console

from ..history import Folded, Replay, read_all
from ..views import event_line, status_panel
from .options import Json, RedisUrl, RunArgument, log_of, print_json


def replay(
    run: RunArgument,
    until: Annotated[
        str | None,
        typer.Option(
            "--until",
            help="Stop after this entry id, or when this step is first announced.",
            metavar="ID|STEP",
            show_default=False,
        ),
    ] = None,
    timeline: Annotated[
        bool, typer.Option(help="Print every event with what it made true, before the state.")
    ] = True,
    redis_url: RedisUrl = None,
    as_json: Json = False,
) -> None:
    """Fold a run's log again, from its first event on, and show the state that it leads to.

    Example: trinity-events replay demo-1 --until 40 --no-timeline
    """
    anyio.run(_replay, redis_url, run, until, timeline and not as_json, as_json)


async def _replay(
    redis_url: str | None, run: str, until: str | None, timeline: bool, as_json: bool
) -> None:
    replaying = Replay(run, until)
    async with log_of(redis_url, run) as log:
        async for entry in read_all(log):
            for folded in replaying.feed([entry]):
                if timeline:
                    _print(folded, (replaying.state.opened_at or 0) / 1000)
            if until is not None and replaying.finished:
                break
    replaying.check_finished()
    if as_json:
        print_json(replaying.state)
    else:
        Console().print(status_panel(replaying.state))


def _print(folded: Folded, run_start: float) -> None:
    entry_id = folded.entry.id
    if folded.envelope is None:
        print(f"{entry_id:<18} undecodable")
        return
    print(event_line(entry_id, folded.envelope, run_start=run_start))
    for announcement in folded.announcements:
        print(event_line(entry_id, announcement, run_start=run_start))
