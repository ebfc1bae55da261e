"""``trinity-events export`` and ``trinity-events import``."""

from __future__ import annotations

import re
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import anyio
import typer

from ..archive import NotWritten, Recording, import_recording, read_recording, record_run
from ..archive.format import file_written, write_file
from ..archive.segments import Archive
from ..core.timeline import Timeline
from ..errors import TrinityError
from ..log import Entry, position
from ..testing.history import as_test_file
from ..views.perfetto import Trace
from ..views.terminal import say
from .options import (
    CheckpointRoot,
    RedisUrl,
    RunArgument,
    checkpoint_root,
    client_of,
    log_of,
)
from .sources import states_of


class OutputUnusable(TrinityError):
    """The output file cannot be written."""


File = Annotated[Path, typer.Argument(help="File that export wrote.", show_default=False)]


def export(
    run: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; by default RUN.jsonl."),
    ] = None,
    as_pytest: Annotated[
        bool,
        typer.Option("--pytest", help="Write a test file instead: test_RUN.py. It runs by itself."),
    ] = False,
    as_perfetto: Annotated[
        bool,
        typer.Option(
            "--perfetto", help="Write a trace instead: RUN.pftrace, which ui.perfetto.dev opens."
        ),
    ] = False,
    until: Annotated[
        str | None,
        typer.Option(
            metavar="ID|STEP",
            help="With --pytest: only up to this entry, or this step's first announcement.",
            show_default=False,
        ),
    ] = None,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
) -> None:
    """Write a run's whole log to a file of JSON lines, with the archived entries.

    With --pytest and --perfetto, RUN may be a file that export wrote.

    Example: trinity-events export demo-1 --output demo-1.jsonl

    Example: trinity-events export demo-1 --pytest --until 4
    """
    if until is not None and not as_pytest:
        raise OutputUnusable(
            "--until cuts the history of --pytest alone: leave it out, or add that"
        )
    if str(output) == "-":
        raise OutputUnusable("export writes a file, whole or not at all: name one with --output")
    if as_pytest and as_perfetto:
        raise OutputUnusable("export writes one file: give --pytest or --perfetto, not both")
    try:
        if as_pytest:
            anyio.run(_export_pytest, run, root, redis_url, until, output)
        elif as_perfetto:
            anyio.run(_export_perfetto, run, root, redis_url, output)
        else:
            path = output or Path(f"{run}.jsonl")
            count = anyio.run(_export, redis_url, run, path, checkpoint_root(root))
            say(f"{count} entries of run {run} in {path}")
    except NotWritten as error:
        raise OutputUnusable(f"{error}: name another with --output") from None


def import_(path: File, redis_url: RedisUrl = None) -> None:
    """Put an exported run on a server, so that status, tail, replay and other commands find it.

    Example: trinity-events import demo-1.jsonl
    """
    recording = read_recording(path)
    anyio.run(_import, redis_url, recording)
    say(
        f"run {recording.header.run_id} is imported: trinity-events status "
        f"{recording.header.run_id}"
    )


async def _export(redis_url: str | None, run: str, path: Path, root: Path) -> int:
    async with log_of(redis_url, run) as log:
        return await record_run(log, path, Archive(root / run, run))


async def _export_pytest(
    run: str, root: Path | None, redis_url: str | None, until: str | None, output: Path | None
) -> None:
    async with states_of(run, root, redis_url) as states:
        run_id = states.source.run_id
        last = None if until is None else position(await states.entry_of(until))
        entries: list[Entry] = []
        async with aclosing(states.source.events()) as events:
            async for entry in events:
                if last is not None and position(entry.id) > last:
                    break
                entries.append(entry)
    path = output or Path(f"test_{re.sub(r'[^0-9A-Za-z]+', '_', run_id)}.py")
    write_file(path, as_test_file(run_id, entries).encode())
    say(f"{len(entries)} events of run {run_id} in {path}: pytest {path}")


async def _export_perfetto(
    run: str, root: Path | None, redis_url: str | None, output: Path | None
) -> None:
    async with states_of(run, root, redis_url) as states:
        path = output or Path(f"{states.source.run_id}.pftrace")
        with file_written(path) as file:
            trace, timeline = Trace(states.source.run_id, file), Timeline()
            async with aclosing(states.folded()) as entries:
                async for _, (entry, envelope, announcements) in entries:
                    if envelope is not None:
                        trace.add_all(timeline.add(entry.id, envelope))
                    for one in announcements:
                        trace.add_all(timeline.add(entry.id, one))
            trace.add_all(timeline.finish())
    say(f"{trace.spans} spans of run {states.source.run_id} in {path}: open it in ui.perfetto.dev")


async def _import(redis_url: str | None, recording: Recording) -> None:
    async with client_of(redis_url) as client:
        await import_recording(client, recording)
