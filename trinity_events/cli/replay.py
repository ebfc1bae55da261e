"""``trinity-events replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
import typer

from ..archive.export import whole_stream
from ..archive.format import read_lines
from ..archive.segments import Archive
from ..log import Entry, Stream
from ..replay import Folded, Replay
from ..views import event_line, state_as_json, status_panel
from ..views.terminal import say
from .options import CheckpointRoot, Json, RedisUrl, checkpoint_root, console, log_of, print_json
from .verify import OptionalRunOrFile, recorded_file


def replay(
    run: OptionalRunOrFile = None,
    until: Annotated[
        str | None,
        typer.Option(
            "--until",
            help="Stop after this entry id, or at the first announcement of this step.",
            metavar="ID|STEP",
            show_default=False,
        ),
    ] = None,
    timeline: Annotated[
        bool, typer.Option(help="Print every event with its announcements, before the state.")
    ] = True,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
    as_json: Json = False,
) -> None:
    """Fold a log again from its first event on, and show the resulting state.

    With a file, no server is needed.

    Example: trinity-events replay demo-1 --until 40 --no-timeline
    """
    show = timeline and not as_json
    path = None if run is None else recorded_file(run)
    if path is not None:
        header, lines = read_lines(path)
        replaying = Replay(header.run_id, until)
        for line in lines:
            if line.stream == Stream.EVENTS.value and not _feed(replaying, line.entry, show=show):
                break
    else:
        replaying = anyio.run(_replay_run, redis_url, run, checkpoint_root(root), until, show)
    replaying.check_finished()
    if as_json:
        print_json(state_as_json(replaying.state))
    else:
        console().print(status_panel(replaying.state))


async def _replay_run(
    redis_url: str | None, run: str | None, root: Path, until: str | None, show: bool
) -> Replay:
    async with log_of(redis_url, run) as log:
        replaying = Replay(log.run_id, until)
        archive = Archive(root / log.run_id, log.run_id)
        async for entry in whole_stream(log, Stream.EVENTS, archive):
            if not _feed(replaying, entry, show=show):
                break
    return replaying


def _feed(replaying: Replay, entry: Entry, *, show: bool) -> bool:
    """Fold one entry; return False to stop."""
    for folded in replaying.feed([entry]):
        if show:
            _print(folded, (replaying.state.opened_at or 0) / 1000)
    return replaying.wants_more


def _print(folded: Folded, run_start: float) -> None:
    entry_id = folded.entry.id
    if folded.envelope is None:
        say(f"{entry_id:<18} undecodable")
        return
    say(event_line(entry_id, folded.envelope, run_start=run_start), lines=False)
    for announcement in folded.announcements:
        say(event_line(entry_id, announcement, run_start=run_start), lines=False)
