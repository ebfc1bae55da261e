"""Options shared by several commands."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec
import redis.asyncio
import typer

from trinity_schemas import check_run_id

from ..errors import InvalidRunId
from ..log import RedisEventLog, require_run
from ..server import connect, serving, trinity_home
from ..views.terminal import LogFormatter, Terminal, print_out

RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar="TRINITY_REDIS_URL",
        help="Server of the event log; by default the embedded server.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunArgument = Annotated[str, typer.Argument(help="The run's id.", show_default=False)]
OptionalRun = Annotated[
    str | None, typer.Argument(help="The run's id; by default the newest run.", show_default=False)
]
CheckpointRoot = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint-root",
        help="Folder with one checkpoint directory per run; by default below TRINITY_HOME.",
        show_default=False,
    ),
]
ListenHost = Annotated[str, typer.Option("--host", help="Address to listen at.")]
ListenPort = Annotated[
    int, typer.Option("--port", help="Port to listen at; 0 takes a free one.", min=0, max=65_535)
]
PIPE_WIDTH = 160
"""Columns of output that is no terminal: rich takes it for 80 columns, and would cut tables."""
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log every announcement.")]


def parse_run_id(run: str) -> str:
    """Return a valid run id. Raises InvalidRunId."""
    try:
        return check_run_id(run)
    except ValueError as error:
        raise InvalidRunId(run, str(error)) from None


def checkpoint_root(given: Path | None) -> Path:
    """Return the given folder, or the default below ``TRINITY_HOME``."""
    return given or trinity_home() / "checkpoints"


def log_to_stderr(*, verbose: bool) -> None:
    """Send log records to standard error, for long-running commands."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


@asynccontextmanager
async def open_client(redis_url: str | None) -> AsyncIterator[redis.asyncio.Redis]:
    """Open a client of the chosen server."""
    with serving(redis_url) as url:
        async with connect(url) as client:
            yield client


@asynccontextmanager
async def open_log(redis_url: str | None, run: str | None) -> AsyncIterator[RedisEventLog]:
    """Open the log of an existing run."""
    async with open_client(redis_url) as client:
        yield RedisEventLog(client, await require_run(client, run))


def print_now(text: str) -> None:
    """Print text and flush it, for a command that runs on."""
    print_out(text)
    sys.stdout.flush()


def console(out: TextIO | None = None) -> Terminal:
    """Return a console on standard output; a pipe or file gets wide, uncut lines."""
    out = out or sys.stdout
    return Terminal(file=out, width=None if out.isatty() else PIPE_WIDTH)


def print_json(value: Any, out: TextIO | None = None) -> None:
    """Print one line of JSON on standard output; NaN and infinity become null."""
    # Python's encoder writes NaN, which is no JSON (RFC 8259, section 6).
    line = json.dumps(_finite(msgspec.to_builtins(value, str_keys=True)), allow_nan=False)
    # The only control character that JSON does not escape.
    print_out(line.replace("\x7f", r"\u007f"), file=out)


def _finite(value: Any) -> Any:
    """Return a value with None for every NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
