"""``trinity-events verify``."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import anyio
import typer

from ..archive import NotWritten, Recording, Report, read_recording, record_run
from ..archive import verify as check
from ..archive.format import bare_line
from ..archive.segments import Archive
from ..errors import TrinityError
from ..system.counts import format_count
from ..views.terminal import visible
from .options import CheckpointRoot, Json, RedisUrl, checkpoint_root, console, open_log, print_json
from .sources import RunOrFile, recorded_file


class NoSpaceForCopy(TrinityError):
    """There is no disk space for a copy of the log.

    Attributes:
        reason: Error of the file.
    """

    reason: str
    text = "{reason}: set TMPDIR to a folder with room for all of the log"


class NoFiles(TrinityError):
    """The checkpoint directory is not there.

    Attributes:
        folder: The directory.
    """

    folder: Path
    text = (
        "{folder} is not there: name the folder that has it with --checkpoint-root, or leave out "
        "--files"
    )


_STYLES = {"mismatch": "bold red", "anomaly": "yellow", "open": "dim"}


def verify(
    run: RunOrFile,
    files: Annotated[
        bool,
        typer.Option("--files", help="Compare checkpoint files with the digests in the log too."),
    ] = False,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
    as_json: Json = False,
) -> None:
    """Fold a log again, and compare announcements, snapshot and iteration files with the result.

    Also lists duplicates, gaps, refused weights, and saves that began and never ended. Exits
    with 1 on a mismatch.

    Example: trinity-events verify demo-1 --files
    """
    path = recorded_file(run)
    if path is not None:
        recording = read_recording(path)
        report = check(recording, run_folder=_find_folder(recording, root, files), files=files)
    else:
        report = anyio.run(_verify, redis_url, run, checkpoint_root(root), files)
    if as_json:
        print_json(report)
    else:
        _print(report)
    if not report.sound:
        sys.exit(1)


def _find_folder(recording: Recording, root: Path | None, files: bool) -> Path | None:
    """Return the checkpoint directory of an exported run, if its files are asked for."""
    if not files:
        return None
    folder = checkpoint_root(root) / recording.header.run_id
    if not folder.is_dir():
        raise NoFiles(folder)
    return folder


async def _verify(redis_url: str | None, run: str, root: Path, files: bool) -> Report:
    folder = root / run
    # A copy on disk, as a file is checked: the log may exceed the memory.
    with TemporaryDirectory(prefix="trinity-events-") as room:
        path = Path(room) / "log.jsonl"
        async with open_log(redis_url, run) as log:
            # Before the log: a snapshot that is written meanwhile would be newer.
            snapshot, _ = await log.load()
            try:
                await record_run(log, path, Archive(folder, run), bare_line)
            except NotWritten as error:
                raise NoSpaceForCopy(str(error)) from None
        recording = read_recording(path)
        # Iteration files are compared wherever the folder is there; only --files makes its absence
        # an error.
        there = folder if folder.is_dir() else _find_folder(recording, root, files)
        return check(recording, snapshot, there, files=files)


def _print(report: Report) -> None:
    out = console()
    for finding in report.findings:
        what = visible(finding.what, lines=False)
        out.print(f"{finding.severity:<9} {what}", style=_STYLES[finding.severity])
    verdict = "sound" if report.sound else "NOT sound"
    out.print(
        f"run {report.run_id} is {verdict}: "
        f"{format_count(report.entries, 'entry', 'entries')} and "
        f"{format_count(report.announcements, 'announcement')}, compared with "
        f"{', '.join(report.checked)}"
    )
