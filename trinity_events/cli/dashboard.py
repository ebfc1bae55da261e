"""``trinity-events dashboard``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import anyio
import typer

from ..archive import Archive
from ..errors import PackageMissing, TrinityError
from ..server import connect, serving
from .options import (
    CheckpointRoot,
    ListenHost,
    ListenPort,
    RedisUrl,
    checkpoint_root,
    log_to_stderr,
    print_now,
)
from .reducer import until_stopped

if TYPE_CHECKING:
    from ..dashboard.board import Board
    from ..dashboard.sources import RecordedSource

PORT = 8760
"""Default port of the dashboard."""
SHORTEST_TOKEN = 16
"""Characters that a token has at least."""


class TokenTooShort(TrinityError):
    """The token can be guessed.

    Attributes:
        shortest: Characters that it has at least.
    """

    shortest: int
    text = "the dashboard's token has less than {shortest} characters: give a longer one"


def dashboard(
    recording: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE|FOLDER]",
            help="File that export wrote, or folder of a run, to show without a server.",
            show_default=False,
        ),
    ] = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Show a recorded run of 64 workers with faults.")
    ] = False,
    host: ListenHost = "127.0.0.1",
    port: ListenPort = PORT,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="TRINITY_DASHBOARD_TOKEN",
            help="Token that viewers need; beyond loopback one is made if none is given.",
            show_default=False,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Further name by which browsers reach the dashboard.", metavar="NAME"),
    ] = None,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
) -> None:
    """Serve pages about runs: state now, timeline, versions, figures, and any state of the past.

    The pages only read. They follow running runs, and need the rights of the user viewer alone.

    Example: trinity-events dashboard

    Example: trinity-events dashboard --demo
    """
    log_to_stderr(verbose=False)
    web = _web()
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise TokenTooShort(SHORTEST_TOKEN)
    # Pages show the texts of answers: beyond this host, an address alone must not be enough.
    if token is None and not web.is_loopback(host):
        token = web.new_token()
    with ExitStack() as exits:
        opened: Callable[[], AbstractAsyncContextManager[Board]]
        if recording is not None or demo:
            # A recording needs neither a server nor its rights.
            opened = partial(_recorded, _open_recording(recording))
        else:
            url = exits.enter_context(serving(redis_url))
            opened = partial(_on_server, url, checkpoint_root(root))
        # Bound before the page's address is printed: port 0 has its number only then.
        listening = exits.enter_context(web.listening_socket(host, port))
        page = web.page_url(host, listening.getsockname()[1], token)
        started = partial(print_now, f"dashboard at {page} (Ctrl-C stops)")
        # Requests under other names are refused: a foreign page reaches this address by DNS
        # rebinding (dashboard/guard.py).
        hosts = [*(allow_host or ()), host]
        serve = partial(web.serve_board, opened, listening, token, hosts, started)
        anyio.run(until_stopped, serve)


def _web() -> ModuleType:
    """Return the module of the web server. Raises PackageMissing."""
    try:
        from ..dashboard import web_server
    except ModuleNotFoundError as error:
        raise PackageMissing(
            "the dashboard", str(error.name), "trinity-events[dashboard]"
        ) from None
    return web_server


def _open_recording(recording: Path | None) -> RecordedSource:
    """Return the log of a file or a folder, or that of the demo."""
    from ..dashboard.simulated_record import open_simulated_run
    from ..dashboard.simulated_run import Plan
    from ..dashboard.sources import RecordedSource

    if recording is None:
        return open_simulated_run(Plan())
    if recording.is_dir():
        return RecordedSource.from_archive(recording)
    return RecordedSource.from_file(recording)


@asynccontextmanager
async def _recorded(source: RecordedSource) -> AsyncIterator[Board]:
    from ..dashboard.board import RecordedRuns, board

    try:
        async with board(RecordedRuns(source)) as opened:
            yield opened
    finally:
        source.close()


@asynccontextmanager
async def _on_server(url: str, root: Path) -> AsyncIterator[Board]:
    from ..dashboard.board import ServerRuns, board

    async with connect(url) as client:
        runs = ServerRuns(client, lambda run: Archive(root / run, run))
        async with board(runs) as opened:
            yield opened
