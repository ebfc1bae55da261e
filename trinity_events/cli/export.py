"""``trinity-events export`` and ``trinity-events import``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import anyio
import typer

from ..archive import NotWritten, Recording, import_recording, read_recording, record_run
from ..archive.segments import Archive
from ..errors import TrinityError
from ..views.terminal import say
from .options import (
    CheckpointRoot,
    RedisUrl,
    RunArgument,
    checkpoint_root,
    client_of,
    log_of,
)


class OutputUnusable(TrinityError):
    """The output file cannot be written."""


File = Annotated[Path, typer.Argument(help="File that export wrote.", show_default=False)]


def export(
    run: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; by default RUN.jsonl."),
    ] = None,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
) -> None:
    """Write a run's whole log to a file of JSON lines, with the archived entries.

    Example: trinity-events export demo-1 --output demo-1.jsonl
    """
    path = output or Path(f"{run}.jsonl")
    if str(path) == "-":
        raise OutputUnusable("export writes a file, whole or not at all: name one with --output")
    try:
        count = anyio.run(_export, redis_url, run, path, checkpoint_root(root))
    except NotWritten as error:
        raise OutputUnusable(f"{error}: name another with --output") from None
    say(f"{count} entries of run {run} in {path}")


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


async def _import(redis_url: str | None, recording: Recording) -> None:
    async with client_of(redis_url) as client:
        await import_recording(client, recording)
