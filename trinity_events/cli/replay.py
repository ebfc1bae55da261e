"""``trinity-events replay``."""

from __future__ import annotations

import sys
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import anyio
import anyio.to_thread
import typer
from msgspec import Struct

from ..analysis.changes import changes
from ..archive.export import whole_stream
from ..archive.format import read_lines
from ..archive.segments import Archive
from ..archive.state_at import StateAt
from ..core import MonitorState
from ..log import Entry, Stream, position
from ..replay import Replay
from ..views import format_folded, state_as_json, status_panel
from ..views.changes import format_change, is_relevant
from ..views.documents import Step
from ..views.terminal import print_err, print_out
from .options import CheckpointRoot, Json, RedisUrl, checkpoint_root, console, open_log, print_json
from .sources import OptionalRunOrFile, open_states, recorded_file


class _Steps(Struct, frozen=True, kw_only=True):
    """Part of the log that is shown event by event."""

    begin: str | None = None
    until: str | None = None
    as_json: bool = False
    is_interactive: bool = False
    """True to wait for the user after each event."""


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
    step: Annotated[
        bool,
        typer.Option(
            "--step", help="Show one event at a time, with each change of the state by it."
        ),
    ] = False,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from", help="With --step: begin after this.", metavar="ID|STEP", show_default=False
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

    With --until and without a timeline, it begins at a kept state, so that a long log takes no
    longer than a short one. With a file, no server is needed.

    Example: trinity-events replay demo-1 --until 40 --no-timeline

    Example: trinity-events replay demo-1 --step --from 3
    """
    if step or begin is not None:
        # A pipe has no user who presses Enter.
        is_interactive = sys.stdin.isatty() and sys.stdout.isatty() and not as_json
        steps = _Steps(begin=begin, until=until, as_json=as_json, is_interactive=is_interactive)
        anyio.run(_show_steps, run, root, redis_url, steps)
        return
    show = timeline and not as_json
    # Nothing between is printed, so that the fold may begin at a kept state (decision 26).
    if until is not None and not show:
        state = anyio.run(_state_at, run, root, redis_url, until)
    else:
        state = _replay(run, root, redis_url, until, show=show)
    if as_json:
        print_json(state_as_json(state))
    else:
        console().print(status_panel(state))


def _replay(
    run: str | None, root: Path | None, redis_url: str | None, until: str | None, *, show: bool
) -> MonitorState:
    path = recorded_file(run)
    if path is not None:
        header, lines = read_lines(path)
        replaying = Replay(header.run_id, until)
        for line in lines:
            if line.stream == Stream.EVENTS.value and not _feed(replaying, line.entry, show=show):
                break
    else:
        replaying = anyio.run(_replay_run, redis_url, run, checkpoint_root(root), until, show)
    replaying.check_finished()
    return replaying.state


async def _replay_run(
    redis_url: str | None, run: str | None, root: Path, until: str | None, show: bool
) -> Replay:
    async with open_log(redis_url, run) as log:
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
            for line in format_folded(folded, run_start=(replaying.state.opened_at or 0) / 1000):
                print_out(line, lines=False)
    return replaying.wants_more


async def _state_at(
    run: str | None, root: Path | None, redis_url: str | None, until: str
) -> MonitorState:
    async with open_states(run, root, redis_url) as states:
        return await states.at(await states.entry_of(until))


async def _show_steps(
    run: str | None, root: Path | None, redis_url: str | None, steps: _Steps
) -> None:
    async with open_states(run, root, redis_url) as states:
        begin = "0-0" if steps.begin is None else await states.entry_of(steps.begin)
        until = None if steps.until is None else await states.entry_of(steps.until)
        await _show(states, begin, until, steps)


async def _show(states: StateAt, begin: str, until: str | None, steps: _Steps) -> None:
    """Show each entry between two positions, with the changes of the state by it."""
    before = state_as_json(await states.at(begin))
    async with aclosing(states.folded(begin)) as entries:
        async for state, folded in entries:
            if until is not None and position(folded.entry.id) > position(until):
                return
            # The fold changes this state with the next entry: its JSON is a copy.
            now = state_as_json(state)
            differences = [change for change in changes(before, now) if is_relevant(change)]
            before = now
            if steps.as_json:
                print_json(
                    Step(
                        id=folded.entry.id,
                        envelope=folded.envelope,
                        announcements=folded.announcements,
                        changes=differences,
                    )
                )
                continue
            for line in format_folded(folded, run_start=(state.opened_at or 0) / 1000):
                print_out(line, lines=False)
            for change in differences:
                print_out(f"    {format_change(change)}", lines=False)
            if steps.is_interactive and not await anyio.to_thread.run_sync(_wait_for_user):
                return


def _wait_for_user() -> bool:
    """Wait for the user; return False to stop."""
    print_err("Enter: the next event; q and Enter: stop")
    return not sys.stdin.readline().strip().startswith("q")
