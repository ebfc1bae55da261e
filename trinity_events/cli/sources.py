"""Logs of runs and of files, for commands that take either."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer

from ..analysis.timeline import Part, Timeline
from ..archive.state_at import FileSource, RunSource, StateAt
from .options import checkpoint_root, open_log

RunOrFile = Annotated[
    str, typer.Argument(metavar="RUN|FILE", help="A run, or a file that export wrote.")
]
OptionalRunOrFile = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN|FILE]",
        help="A run, or a file that export wrote; by default the newest run.",
        show_default=False,
    ),
]


def recorded_file(run_or_file: str | None) -> Path | None:
    """Return the file that the argument names; None if it names a run."""
    if run_or_file is None:
        return None
    path = Path(run_or_file)
    # By its ending too, although a run's id may have it: a file that is missing is then called so,
    # and no unknown run.
    return path if path.suffix == ".jsonl" or path.is_file() else None


@asynccontextmanager
async def open_states(
    run_or_file: str | None, root: Path | None, redis_url: str | None
) -> AsyncIterator[StateAt]:
    """Open the states of a run, or of a file, for which no server is needed."""
    path = recorded_file(run_or_file)
    if path is not None:
        yield StateAt(FileSource(path))
        return
    async with open_log(redis_url, run_or_file) as log:
        yield StateAt(RunSource(log, checkpoint_root(root)))


async def read_timeline(states: StateAt) -> AsyncGenerator[Iterable[Part], None]:
    """Yield the parts of a log's timeline, those of each entry together."""
    timeline = Timeline()
    async with aclosing(states.folded()) as entries:
        async for _, folded in entries:
            if folded.envelope is not None:
                yield timeline.add(folded.entry.id, folded.envelope)
            for announcement in folded.announcements:
                yield timeline.add(folded.entry.id, announcement)
    yield timeline.finish()
