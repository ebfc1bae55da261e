"""``trinity-events diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
import typer

from ..analysis.changes import changes
from ..archive.state_at import StateAt
from ..core import MonitorState
from ..views import state_as_json
from ..views.changes import format_change, is_relevant
from ..views.documents import Difference
from ..views.terminal import print_out
from .options import CheckpointRoot, Json, RedisUrl, print_json
from .sources import RunOrFile, open_states

_PLACE = "An entry id as tail prints them, or a step: the entry of its first announcement."


def diff(
    run: RunOrFile,
    first: Annotated[str, typer.Argument(metavar="A", help=_PLACE)],
    second: Annotated[str, typer.Argument(metavar="B", help=_PLACE)],
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
    as_json: Json = False,
) -> None:
    """Compare the states of a run after two entries or steps, field by field.

    Field names are those of status --json. With a file, no server is needed.

    Example: trinity-events diff demo-1 3 4
    """
    start, end = anyio.run(_states, run, root, redis_url, first, second)
    differences = list(changes(state_as_json(start), state_as_json(end)))
    if as_json:
        print_json(
            Difference(
                run_id=start.run_id,
                begin=start.position,
                end=end.position,
                changes=differences,
            )
        )
        return
    print_out(f"from entry {start.position} ({start.entries}) to {end.position} ({end.entries})")
    for change in differences:
        if is_relevant(change):
            print_out(format_change(change), lines=False)


async def _states(
    run: str, root: Path | None, redis_url: str | None, *places: str
) -> list[MonitorState]:
    async with open_states(run, root, redis_url) as states:
        return [await _state(states, place) for place in places]


async def _state(states: StateAt, place: str) -> MonitorState:
    return await states.at(await states.entry_of(place))
