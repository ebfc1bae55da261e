"""Options that several commands take."""

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
from ..views.terminal import LogFormatter, Terminal, say

RedisUrl = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar="TRINITY_REDIS_URL",
        help="Server of the event log; the embedded server when left out.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
RunArgument = Annotated[str, typer.Argument(help="The run's id.", show_default=False)]
OptionalRun = Annotated[
    str | None, typer.Argument(help="The run's id; the newest when left out.", show_default=False)
]
CheckpointRoot = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint-root",
        help="Folder with one checkpoint directory a run; below TRINITY_HOME when left out.",
        show_default=False,
    ),
]
PIPE_WIDTH = 160
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log every announcement.")]


def checked_run(run: str) -> str:
    """The run's id, if it can be one."""
    try:
        return check_run_id(run)
    except ValueError as error:
        raise InvalidRunId(str(error)) from None


def checkpoint_root(given: Path | None) -> Path:
    """The folder given, or the one below ``TRINITY_HOME``."""
    return given or trinity_home() / "checkpoints"


def log_to_stderr(*, verbose: bool) -> None:
    """Logging for commands that run for long."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


@asynccontextmanager
async def client_of(redis_url: str | None) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of the server that was chosen."""
    with serving(redis_url) as url:
        async with connect(url) as client:
            yield client


@asynccontextmanager
async def log_of(redis_url: str | None, run: str | None) -> AsyncIterator[RedisEventLog]:
    """The log of a run that must be there."""
    async with client_of(redis_url) as client:
        yield RedisEventLog(client, await require_run(client, run))


def console(out: TextIO | None = None) -> Terminal:
    """Standard output; wide where it is no terminal, so that a pipe or a file loses nothing."""
    out = out or sys.stdout
    return Terminal(file=out, width=None if out.isatty() else PIPE_WIDTH)


def print_json(value: Any, out: TextIO | None = None) -> None:
    """Print one line of JSON on standard output; numbers that JSON does not have are null."""
    line = json.dumps(_finite(msgspec.to_builtins(value, str_keys=True)), allow_nan=False)
    # The one control character that JSON leaves as it is.
    say(line.replace("\x7f", r"\u007f"), file=out)


def _finite(value: Any) -> Any:
    """Return a value of which every NaN and infinity is None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
