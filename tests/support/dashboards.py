"""Dashboards of tests: a real web server in the test's event loop, asked over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlencode

import anyio
import anyio.from_thread
import anyio.to_thread

from tests.support.waits import PATIENCE, child
from trinity_events.dashboard.board import (
    Board,
    DashboardLimits,
    RecordedRuns,
    Runs,
    ServerRuns,
    board,
)
from trinity_events.dashboard.simulated_record import open_simulated_run
from trinity_events.dashboard.simulated_run import Plan
from trinity_events.dashboard.web_server import listening_socket, serve_board
from trinity_events.log import Entry
from trinity_events.log.redis.run_index import add_run
from trinity_schemas import RunKeys

SMALL = Plan(run_id="small", ranks=4, explorers=6, steps=24, save_interval=5, faults=False)


class Answer(NamedTuple):
    """Answer of a dashboard."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Dashboard(NamedTuple):
    """Dashboard at a port of this machine."""

    port: int
    token: str | None

    async def ask(self, path: str, headers: dict[str, str] | None = None, method="GET", **query):
        """Ask over HTTP, in a connection of its own."""
        return await anyio.to_thread.run_sync(
            partial(self._ask, path, headers or {}, method, query), abandon_on_cancel=True
        )

    async def json(self, path: str, **query: Any) -> Any:
        """Return an answer that must be there."""
        answer = await self.ask(path, **query)
        assert answer.status == 200, answer.body
        return answer.json

    def _ask(self, path, headers, method, query) -> Answer:
        url = path + (f"?{urlencode(query)}" if query else "")
        given = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as conn:
            conn.request(method, url, headers=given | headers)
            reply = conn.getresponse()
            return Answer(reply.status, reply.headers, reply.read())

    async def indexed(self, run: str) -> dict[str, Any]:
        """Wait until a run is indexed to its end; return its state."""
        with anyio.fail_after(PATIENCE):
            while True:
                status = await self.json(f"/api/runs/{run}/now")
                if status["progress"] == 1.0:
                    return status
                await anyio.sleep(0.05)


@asynccontextmanager
async def dashboard(
    runs: Runs,
    *,
    token: str | None = None,
    hosts: Iterable[str] = (),
    limits: DashboardLimits = DashboardLimits(),
) -> AsyncIterator[Dashboard]:
    """Serve a dashboard at a free port."""
    started = asyncio.Event()

    @asynccontextmanager
    async def opened() -> AsyncIterator[Board]:
        async with board(runs, limits) as opened_board:
            yield opened_board

    with closing(listening_socket("127.0.0.1", 0)) as listening:
        serving = asyncio.ensure_future(
            serve_board(opened, listening, token, list(hosts), started.set)
        )
        try:
            with anyio.fail_after(PATIENCE):
                await started.wait()
            yield Dashboard(listening.getsockname()[1], token)
        finally:
            serving.cancel()
            await asyncio.wait([serving])


@asynccontextmanager
async def dashboard_of(plan: Plan, **keywords: Any) -> AsyncIterator[Dashboard]:
    """Serve a dashboard of a simulated run that is recorded."""
    with closing(open_simulated_run(plan)) as source:
        async with dashboard(RecordedRuns(source), **keywords) as served:
            await served.indexed(plan.run_id)
            yield served


@contextmanager
def shared_dashboard(plan: Plan, **keywords: Any) -> Iterator[Dashboard]:
    """Serve a dashboard of a simulated run from another thread, for all tests of a module."""
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(dashboard_of(plan, **keywords)) as served,
    ):
        yield served


def server_runs(client) -> ServerRuns:
    """The runs of a server, without archives."""
    return ServerRuns(client, lambda _: None)


async def put_run(client, run_id: str, entries: Iterable[Entry]) -> int:
    """Put a log on a server, with its ids; return the number of entries."""
    count = 0
    async with client.pipeline(transaction=False) as pipe:
        for entry in entries:
            pipe.xadd(RunKeys.of(run_id).events, {"e": entry.payload}, id=entry.id)
            count += 1
        await pipe.execute()
    await add_run(client, run_id)
    return count


class Stream:
    """Live stream of a run."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    @asynccontextmanager
    async def of(cls, at: Dashboard, run: str) -> AsyncIterator[Stream]:
        """Open a live stream, and close it on leaving."""
        reader, writer = await asyncio.open_connection("127.0.0.1", at.port, limit=1 << 24)
        writer.write(f"GET /api/runs/{run}/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        await writer.drain()
        try:
            yield cls(reader, writer)
        finally:
            writer.close()

    async def until(self, condition) -> dict[str, Any]:
        """Read until a state is wanted; return it."""
        with anyio.fail_after(PATIENCE):
            while True:
                line = await self._reader.readline()
                assert line, "the stream ended"
                if line.startswith(b"data: "):
                    state = json.loads(line[6:])
                    if condition(state):
                        return state


@contextmanager
def dashboard_process(redis_url: str) -> Iterator[str]:
    """Run the command on a server; yield the address of its pages."""
    command = [sys.executable, "-m", "trinity_events", "dashboard", "--port", "0"]
    with child([*command, "--redis-url", redis_url], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = re.search(r"http://\S+/", process.stdout.readline())
        assert address is not None, "the dashboard did not start"
        yield address[0]
