"""``trinity-events verify``."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import anyio
import typer

from ..archive import NotWritten, Report, read_recording, record_run
from ..archive import verify as check
from ..archive.format import bare_line
from ..archive.segments import Archive
from ..errors import TrinityError
from ..views.terminal import visible
from .options import CheckpointRoot, Json, RedisUrl, checkpoint_root, console, log_of, print_json

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


class NoRoom(TrinityError):
    """There is no disk space for a copy of the log."""


_STYLES = {"mismatch": "bold red", "anomaly": "yellow", "open": "dim"}


def verify(
    run: RunOrFile, root: CheckpointRoot = None, redis_url: RedisUrl = None, as_json: Json = False
) -> None:
    """Fold a log again, and compare announcements, snapshot and iteration files with the result.

    Also lists duplicates, gaps, refused weights, and saves that began and never ended. Exits
    with 1 on a mismatch.

    Example: trinity-events verify demo-1
    """
    path = recorded_file(run)
    if path is not None:
        report = check(read_recording(path))
    else:
        report = anyio.run(_verify, redis_url, run, checkpoint_root(root))
    if as_json:
        print_json(report)
    else:
        _print(report)
    if not report.sound:
        sys.exit(1)


def recorded_file(run_or_file: str) -> Path | None:
    """Return the file that the argument names; None if it names a run."""
    path = Path(run_or_file)
    return path if path.suffix == ".jsonl" or path.is_file() else None


async def _verify(redis_url: str | None, run: str, root: Path) -> Report:
    folder = root / run
    with TemporaryDirectory(prefix="trinity-events-") as room:
        path = Path(room) / "log.jsonl"
        async with log_of(redis_url, run) as log:
            (
                snapshot,
                _,
            ) = await log.load()  # before the log: a snapshot taken meanwhile would be newer
            try:
                await record_run(log, path, Archive(folder, run), bare_line)
            except NotWritten as error:
                raise NoRoom(
                    f"{error}: set TMPDIR to a folder with room for all of the log"
                ) from None
        return check(read_recording(path), snapshot, folder if folder.is_dir() else None)


def _print(report: Report) -> None:
    out = console()
    for finding in report.findings:
        what = visible(finding.what, lines=False)
        out.print(f"{finding.severity:<9} {what}", style=_STYLES[finding.severity])
    verdict = "sound" if report.sound else "NOT sound"
    out.print(
        f"run {report.run_id} is {verdict}: {report.entries} entries and {report.announcements} "
        f"announcements, compared with {', '.join(report.checked)}"
    )
