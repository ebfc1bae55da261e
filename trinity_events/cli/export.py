"""``trinity-events export`` and ``trinity-events import``."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import anyio
import typer

from ..archive import NotWritten, Recording, import_recording, read_recording, record_run
from ..archive.format import file_written, write_file
from ..archive.segments import Archive
from ..checkpoints.layout import ARCHIVE
from ..errors import TrinityError
from ..log import Entry, position, require_run
from ..record.export import ExportFormat, write_rollouts
from ..record.reader import RolloutRecord
from ..system.counts import format_count
from ..testing.history import as_test_file
from ..views.perfetto import PerfettoTrace
from ..views.terminal import print_out
from .options import (
    CheckpointRoot,
    RedisUrl,
    RunArgument,
    checkpoint_root,
    open_client,
    open_log,
    parse_run_id,
)
from .sources import open_states, read_timeline, recorded_file

if TYPE_CHECKING:
    from ..dashboard.sources import DashboardSource


class OutputUnusable(TrinityError):
    """The output file cannot be written.

    Attributes:
        fault: ``until``, ``stdout``, ``several`` or ``rollouts`` for options that contradict each
            other, and ``file`` for a file.
        reason: Error of the file.
    """

    fault: Literal["until", "stdout", "several", "rollouts", "file"]
    reason: str = ""
    texts: ClassVar = {
        "until": "--until cuts the history of --pytest alone: leave it out, or add that",
        "stdout": "export writes a file, whole or not at all: name one with --output",
        "several": "export writes one file: give --pytest, --perfetto, --html or --rollouts alone",
        "rollouts": "--format and --step choose rollouts alone: leave them out, or add --rollouts",
        "file": "{reason}: name another with --output",
    }


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
    as_html: Annotated[
        bool,
        typer.Option("--html", help="Write the dashboard's pages instead, as one file: RUN.html."),
    ] = False,
    rollouts: Annotated[
        bool,
        typer.Option("--rollouts", help="Write the recorded rollouts instead: RUN.rollouts.jsonl."),
    ] = False,
    form: Annotated[
        ExportFormat | None,
        typer.Option(
            "--format",
            help="With --rollouts: rows as jsonl (default) or parquet, or spans of openinference.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            "--step", min=1, help="With --rollouts: only those of this step.", show_default=False
        ),
    ] = None,
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

    With --pytest, --perfetto and --html, RUN may be a file that export wrote. With --html it may
    also be a run's folder.

    Example: trinity-events export demo-1 --output demo-1.jsonl

    Example: trinity-events export demo-1 --pytest --until 4

    Example: trinity-events export demo-1 --html

    Example: trinity-events export demo-1 --rollouts --format parquet
    """
    if until is not None and not as_pytest:
        raise OutputUnusable("until")
    # It would be a file of this name.
    if str(output) == "-":
        raise OutputUnusable("stdout")
    if not rollouts and (form is not None or step is not None):
        raise OutputUnusable("rollouts")
    if as_pytest + as_perfetto + as_html + rollouts > 1:
        raise OutputUnusable("several")
    try:
        if as_pytest:
            anyio.run(_export_pytest, run, root, redis_url, until, output)
        elif rollouts:
            _export_rollouts(run, checkpoint_root(root), step, form or ExportFormat.jsonl, output)
        elif as_html:
            anyio.run(_export_html, run, checkpoint_root(root), redis_url, output)
        elif as_perfetto:
            anyio.run(_export_perfetto, run, root, redis_url, output)
        else:
            path = output or Path(f"{run}.jsonl")
            count = anyio.run(_export, redis_url, run, path, checkpoint_root(root))
            print_out(f"{format_count(count, 'entry', 'entries')} of run {run} in {path}")
    # Not every OSError: what cannot be read, such as a segment of the archive, is no fault of the
    # output.
    except NotWritten as error:
        raise OutputUnusable("file", str(error)) from None


def import_(path: File, redis_url: RedisUrl = None) -> None:
    """Put an exported run on a server, so that status, tail, replay and other commands find it.

    Example: trinity-events import demo-1.jsonl
    """
    # Read and checked as a whole before the server has any of it.
    recording = read_recording(path)
    anyio.run(_import, redis_url, recording)
    print_out(
        f"run {recording.header.run_id} is imported: trinity-events status "
        f"{recording.header.run_id}"
    )


async def _export(redis_url: str | None, run: str, path: Path, root: Path) -> int:
    async with open_log(redis_url, run) as log:
        return await record_run(log, path, Archive(root / run, run))


async def _export_html(run: str, root: Path, redis_url: str | None, output: Path | None) -> None:
    from ..dashboard.html_export import build_html

    async with _open_source(run, root, redis_url) as source:
        page = await build_html(source)
    path = output or Path(f"{source.run_id}.html")
    write_file(path, page.encode())
    print_out(f"run {source.run_id} in {path}: open it in a browser")


@asynccontextmanager
async def _open_source(
    run: str, root: Path, redis_url: str | None
) -> AsyncIterator[DashboardSource]:
    """Open the log of a file, of a run's folder, or of a run on a server."""
    from ..dashboard.sources import RecordedSource, ServerSource

    path, is_folder = Path(run), (Path(run) / ARCHIVE).is_dir()
    if is_folder or recorded_file(run) is not None:
        with closing(
            (RecordedSource.from_archive if is_folder else RecordedSource.from_file)(path)
        ) as source:
            yield source
        return
    async with open_client(redis_url) as client:
        run_id = await require_run(client, run)
        yield ServerSource(client, run_id, Archive(root / run_id, run_id))


def _export_rollouts(
    run: str, root: Path, step: int | None, form: ExportFormat, output: Path | None
) -> None:
    run_id = parse_run_id(run)
    record = RolloutRecord(root / run_id, run_id)
    steps = record.list_steps(superseded=True, discarded=True)
    if step is not None or not steps:
        steps = [record.find_step(step)]  # also the error of a run without a record
    path = output or Path(f"{run_id}.rollouts.{form.ending}")
    with file_written(path) as file:
        # As the record itself: answers are for the run's user alone.
        os.fchmod(file.fileno(), 0o600)
        count = write_rollouts(record, steps, form, file)
    samples, of_steps = format_count(count, "sample"), format_count(len(steps), "step")
    print_out(f"{samples} of {of_steps} of run {run_id} in {path}")


async def _export_pytest(
    run: str, root: Path | None, redis_url: str | None, until: str | None, output: Path | None
) -> None:
    async with open_states(run, root, redis_url) as states:
        run_id = states.source.run_id
        last = None if until is None else position(await states.entry_of(until))
        entries: list[Entry] = []
        async with aclosing(states.source.events()) as events:
            async for entry in events:
                if last is not None and position(entry.id) > last:
                    break
                entries.append(entry)
    # A module's name, which pytest imports.
    path = output or Path(f"test_{re.sub(r'[^0-9A-Za-z]+', '_', run_id)}.py")
    write_file(path, as_test_file(run_id, entries).encode())
    written = format_count(len(entries), "event")
    print_out(f"{written} of run {run_id} in {path}: pytest {path}")


async def _export_perfetto(
    run: str, root: Path | None, redis_url: str | None, output: Path | None
) -> None:
    async with open_states(run, root, redis_url) as states:
        path = output or Path(f"{states.source.run_id}.pftrace")
        with file_written(path) as file:
            trace = PerfettoTrace(states.source.run_id, file)
            async with aclosing(read_timeline(states)) as timeline:
                async for parts in timeline:
                    trace.add_all(parts)
    print_out(
        f"{trace.spans} spans of run {states.source.run_id} in {path}: open it in ui.perfetto.dev"
    )


async def _import(redis_url: str | None, recording: Recording) -> None:
    async with open_client(redis_url) as client:
        await import_recording(client, recording)
