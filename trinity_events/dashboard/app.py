"""Application: pages from files of this package, and answers in JSON."""

from __future__ import annotations

import gzip
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import anyio
import msgspec
import redis
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..errors import RunNotFound, TrinityError
from ..http_server.connections import get_connection
from ..record.reader import TRAINED, RecordMissing
from . import queries
from .board import Board, DashboardLimits, TooManyRuns
from .guard import Guard
from .run_reader import InvalidQuery, NotIndexed, RunReader, UnknownEntry
from .samples import get_sample, get_samples
from .search import Search, search_events
from .timeline import get_timeline, parse_rows

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_LONG = 2000
"""Bytes from which on an answer is compressed."""
_SILENCE = 10.0
"""Seconds after which a live stream says that nothing changed."""
_GOODBYE = 0.5
"""Seconds that the last message of a stream may take."""
_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (InvalidQuery, 400),
    (UnknownEntry, 404),
    (RunNotFound, 404),
    (RecordMissing, 404),
    (NotIndexed, 503),
    (TooManyRuns, 503),
    (TrinityError, 502),
    (redis.RedisError, 502),
)

Answer = Callable[[Request, RunReader], Awaitable[Any]]
Opened = Callable[[], AbstractAsyncContextManager[Board]]


def build_application(
    opened: Opened,
    *,
    token: str | None = None,
    hosts: Collection[str] = (),
) -> Starlette:
    """Return the application.

    Args:
        opened: Opens the board.
        token: Token that the data needs; None for none.
        hosts: Names that the server is known by.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with opened() as board:
            app.state.board = board
            yield

    async def runs(request: Request) -> Response:
        board: Board = request.app.state.board
        return _json(request, {"runs": await board.list_runs()})

    live = _Live()
    routes = [
        Route("/api/runs", _answering(runs)),
        Route("/api/runs/{run}/live", live),
        *(
            Route(f"/api/runs/{{run}}/{name}", _run_route(answer))
            for name, answer in _ANSWERS.items()
        ),
        Route("/", _file("index.html")),
        *(Route(f"/{name}", _file(name)) for name in _static_files()),
    ]
    guard = Middleware(Guard, token=token, hosts=hosts)
    app = Starlette(routes=routes, middleware=[guard], lifespan=lifespan)
    app.state.stop_streams = live.stop
    return app


def _static_files() -> list[str]:
    return [str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.suffix in _TYPES]


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    path = STATIC / name
    kind, content = _TYPES[path.suffix], path.read_bytes()

    # From memory, in one turn of the event loop: until it is answered, a connection without a token
    # may end for another one.
    async def send(_: Request) -> Response:
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    return send


def _json(request: Request, value: Any, status: int = 200) -> Response:
    """Return a value as JSON, compressed if it is long and the browser takes it."""
    body = encode(value)
    headers = {}
    if len(body) > _LONG and "gzip" in request.headers.get("accept-encoding", ""):
        # The fastest level: it runs on the event loop.
        body = gzip.compress(body, compresslevel=1)
        headers = {"content-encoding": "gzip", "vary": "accept-encoding"}
    return Response(body, status, headers, media_type="application/json")


def encode(value: Any) -> bytes:
    """Return a value as JSON; NaN and infinity become null, as JSON has neither."""
    return msgspec.json.encode(value)


def _answering(
    ask: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Return a handler that answers errors of users with a sentence."""

    @wraps(ask)
    async def answer(request: Request) -> Response:
        try:
            return await ask(request)
        except Exception as error:
            for kind, status in _STATUS:
                if isinstance(error, kind):
                    return _json(request, {"error": str(error)}, status)
            raise

    return answer


def _run_route(ask: Answer) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        board: Board = request.app.state.board
        reader = await board.reader(request.path_params["run"])
        return _json(request, await ask(request, reader))

    return _answering(answer)


def _number(request: Request, name: str, default: int | None = None) -> int | None:
    text = request.query_params.get(name)
    if text is None or text == "":
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    # NaN fails too: every comparison with it is false.
    if not abs(number) < 2**62:
        raise InvalidQuery("number", text[:40], name)
    return int(number)


async def _at(request: Request, reader: RunReader) -> Any:
    return await queries.get_state(
        reader,
        number=_number(request, "number"),
        entry=request.query_params.get("entry"),
        time=_number(request, "time"),
        whole="whole" in request.query_params,
        changed="changed" in request.query_params,
    )


async def _timeline(request: Request, reader: RunReader) -> Any:
    history = await reader.indexed()
    return await get_timeline(
        reader,
        _number(request, "from", history.begin) or 0,
        _number(request, "to", max(reader.end, history.last)) or 0,
        min(_number(request, "pixels", 1200) or 1200, 8000),
        parse_rows(request.query_params.get("rows", "")),
    )


async def _search(request: Request, reader: RunReader) -> Any:
    query = request.query_params
    return await search_events(
        reader,
        Search(
            types=tuple(tag for tag in query.get("type", "").split(",") if tag),
            producer=query.get("producer", ""),
            step=_number(request, "step"),
            since=_number(request, "since", 0) or 0,
            until=_number(request, "until", 2**61) or 2**61,
            before=_number(request, "before"),
            limit=_number(request, "limit", 50) or 50,
        ),
    )


async def _explain(request: Request, reader: RunReader) -> Any:
    step = _number(request, "step")
    if step is None:
        raise InvalidQuery("step")
    return await queries.explain_step(reader, step)


async def _samples(request: Request, reader: RunReader) -> Any:
    return await get_samples(reader, _number(request, "step"))


async def _sample(request: Request, reader: RunReader) -> Any:
    step, ordinal, sample = (_number(request, name) for name in ("step", "ordinal", "sample"))
    if step is None or ordinal is None or sample is None:
        raise InvalidQuery("step")
    fate = request.query_params.get("fate", TRAINED)
    return await get_sample(reader, step, ordinal, sample, fate, _number(request, "attempt"))


async def _versions(request: Request, reader: RunReader) -> Any:
    return await queries.get_versions(reader, _number(request, "number"))


def _plain(ask: Callable[[RunReader], Awaitable[Any]]) -> Answer:
    async def answer(_: Request, reader: RunReader) -> Any:
        return await ask(reader)

    return answer


_ANSWERS: dict[str, Answer] = {
    "now": _plain(queries.get_now),
    "engines": _plain(queries.get_engines),
    "lanes": _plain(queries.get_lanes),
    "overview": _plain(queries.get_overview),
    "versions": _versions,
    "figures": _plain(queries.get_figures),
    "learning": _plain(queries.get_learning),
    "dead": _plain(queries.get_dead_letters),
    "at": _at,
    "timeline": _timeline,
    "events": _search,
    "explain": _explain,
    "samples": _samples,
    "sample": _sample,
}


class _Live:
    """Stream of the newest state (server-sent events).

    A viewer gets the newest state when it is ready for it, and misses those between: nothing is
    queued for it. All viewers of a run share the encoded message. A viewer that does not read is
    dropped.
    """

    def __init__(self) -> None:
        self._stopping = anyio.Event()
        self._frames: dict[str, tuple[RunReader, int, bytes]] = {}
        self._encoding = anyio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        board: Board = request.app.state.board
        try:
            reader = await board.reader(request.path_params["run"])
            await reader.indexed()
        except TrinityError as error:
            status = next(status for kind, status in _STATUS if isinstance(error, kind))
            await _json(request, {"error": str(error)}, status)(scope, receive, send)
            return
        get_connection(scope).become_stream()
        reader.viewers += 1
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._stream, reader, scope, send, board.limits)
                tasks.start_soon(self._end, send, tasks.cancel_scope)
                while (await receive())["type"] != "http.disconnect":
                    pass
                tasks.cancel_scope.cancel()
        finally:
            reader.viewers -= 1
            reader.used_at = anyio.current_time()
            if not reader.viewers:
                self._frames.pop(reader.source.run_id, None)

    def stop(self) -> None:
        """End all streams, as the server stops."""
        self._stopping.set()

    async def _end(self, send: Send, stream: anyio.CancelScope) -> None:
        await self._stopping.wait()
        # First, so that no message follows the last one.
        stream.cancel()
        with anyio.CancelScope(shield=True), anyio.move_on_after(_GOODBYE):
            await send({"type": "http.response.body", "body": b""})

    async def _stream(
        self, reader: RunReader, scope: Scope, send: Send, limits: DashboardLimits
    ) -> None:
        # nginx would hold a stream back without X-Accel-Buffering.
        start = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
        version = -1
        try:
            with anyio.fail_after(limits.send_seconds) as deadline:
                await send({"type": "http.response.start", "status": 200, "headers": start})
                while True:
                    # Only a message that is being sent has a deadline: a run may be quiet for
                    # hours.
                    deadline.deadline = math.inf
                    changed = await reader.changed(version, _SILENCE)
                    body = b": nothing new\n\n"
                    if changed != version:
                        version, body = await self._frame(reader)
                    deadline.deadline = anyio.current_time() + limits.send_seconds
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    deadline.deadline = math.inf
                    await anyio.sleep(limits.frame_pause)
        except TimeoutError:
            logger.info("a viewer of run %s that read nothing was dropped", reader.source.run_id)
            get_connection(scope).drop()
        except OSError:
            pass  # the viewer went away, which ends the stream

    async def _frame(self, reader: RunReader) -> tuple[int, bytes]:
        """Return the message of the newest state, which is made once for all viewers."""
        run = reader.source.run_id
        # One at a time: viewers that come meanwhile find the message made.
        async with self._encoding:
            cached = self._frames.get(run)
            # Another reader of the run counts its versions from the beginning.
            if cached is None or cached[0] is not reader or cached[1] != reader.version:
                version = reader.version
                data = encode(await queries.get_now(reader))
                cached = reader, version, b"event: now\ndata: " + data + b"\n\n"
                self._frames[run] = cached
        return cached[1], cached[2]
