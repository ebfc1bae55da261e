"""Viewers of a dashboard beside a run: the latency of its steps, and the commands of its server."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import anyio

from trinity_events.server import connect

from .dashboard import dashboard
from .environment import Stage, process, reducer
from .latency import RUN, Sample, milliseconds, paced, pipeline
from .measure import Findings, Noise, Row, median, ratio, say, spread
from .report import SPEED

TITLE = "a run that is watched by viewers of its dashboard"
PLACE = SPEED
_OPENED_AT_ONCE = 32
"""Viewers that connect at a time: a dashboard keeps 64 new connections of one address."""
_CONNECT = 60.0
"""Maximum seconds until all viewers have the state of the run."""


class Watched(NamedTuple):
    """Viewers of one measurement."""

    viewers: int
    """Viewers that read, in one process."""
    silent: int = 0
    """Viewers that never read."""
    killed: int = 0
    """Viewers whose process is killed midway."""

    @property
    def in_words(self) -> str:
        """Return the viewers in words."""
        words = f"{self.viewers} viewer{'' if self.viewers == 1 else 's'}"
        words += f", and {self.silent} that never reads" if self.silent else ""
        return words + (f", and {self.killed} killed midway" if self.killed else "")


ALONE = Watched(0)
WATCHED = (
    ALONE,
    Watched(1),
    Watched(10),
    Watched(100),
    Watched(10, silent=1),
    Watched(10, killed=1),
)


class Size(NamedTuple):
    """Blocks that take turns, and samples in each."""

    blocks: int
    samples: int
    takes: str


SIZES = {
    "tiny": Size(1, 4, "20 s"),
    "small": Size(3, 20, "1 min"),
    "full": Size(10, 40, "4 min"),
}


class Block(NamedTuple):
    """Measurement of one block."""

    latency: float
    """Median seconds from a publish to step-ready."""
    commands: float
    """Commands of the server for each step."""


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure the same run with each number of viewers, in turns."""
    with reducer(on, RUN):
        blocks_by_kind = anyio.run(blocks, on, size, noise)
    alone, single = blocks_by_kind[ALONE], blocks_by_kind[Watched(1)]
    rows = [_latency(which, blocks_by_kind[which], alone) for which in WATCHED if which != ALONE]
    rows += [
        _commands(which, blocks_by_kind[which], single) for which in WATCHED if which.viewers > 1
    ]
    notes = [
        "A viewer holds a stream of server-sent events and reads it. Blocks of each kind take "
        f"turns, {size.blocks} of {size.samples} steps; a ratio is the median over the blocks. "
        "Viewers, dashboard, run and server share the machine: what is beyond the noise of the "
        "first row is their share of its cores.",
        "Commands are all that the server was sent, by every process. One dashboard reads a run "
        "once for all its viewers.",
    ]
    return Findings(rows, notes)


def _latency(which: Watched, samples: list[Block], alone: list[Block]) -> Row:
    ours, peer = [block.latency for block in samples], [block.latency for block in alone]
    return Row(
        what=f"publish to step-ready with {which.in_words}",
        figure=milliseconds(median(ours)),
        peer="no viewer",
        peer_figure=milliseconds(median(peer)),
        ratio=ratio(ours, peer),
        spread=spread(ours),
    )


def _commands(which: Watched, samples: list[Block], single: list[Block]) -> Row:
    ours, peer = [block.commands for block in samples], [block.commands for block in single]
    return Row(
        what=f"commands of the server for each step, {which.in_words}",
        figure=f"{median(ours):.1f}",
        peer="1 viewer",
        peer_figure=f"{median(peer):.1f}",
        ratio=ratio(ours, peer),
        spread=spread(ours),
    )


async def blocks(on: Stage, size: Size, noise: Noise) -> Mapping[Watched, list[Block]]:
    """Return the blocks of each kind."""
    blocks_by_kind: dict[Watched, list[Block]] = {which: [] for which in WATCHED}
    async with connect(on.url) as client, pipeline(on, client) as ready:
        for _ in range(3):  # opens connections and loads scripts
            await ready()
        with dashboard(on) as (port, _):
            for number in range(size.blocks):
                noise.beat()
                say(f"  block {number + 1} of {size.blocks}")
                first = number % len(WATCHED)
                for which in WATCHED[first:] + WATCHED[:first]:
                    blocks_by_kind[which].append(
                        await _block(on, port, which, client, ready, size.samples)
                    )
    return blocks_by_kind


async def _block(
    on: Stage, port: int, which: Watched, client: Any, ready: Sample, samples: int
) -> Block:
    with ExitStack() as exits:
        if which.viewers:
            exits.enter_context(viewing(on, port, which.viewers))
        killed = None
        if which.killed:
            killed = exits.enter_context(viewing(on, port, which.killed))
        for _ in range(which.silent):
            silent = exits.enter_context(socket.create_connection(("127.0.0.1", port)))
            silent.sendall(_request(RUN))
        before, latencies = await _count(client), []
        for number in range(samples):
            if killed is not None and number == samples // 2:
                killed.kill()
            latencies.append(await paced(ready))
        commands = await _count(client) - before
    return Block(median(latencies), commands / samples)


async def _count(client: Any) -> int:
    return int((await client.info("stats"))["total_commands_processed"])


@contextmanager
def viewing(on: Stage, port: int, count: int) -> Iterator[subprocess.Popen[bytes]]:
    """Let viewers read in a process of their own; yield it once all have the run's state."""
    arguments = ("benchmarks.viewers", str(port), RUN, str(count))
    with process(*arguments, home=on.folder, with_output=True) as started:
        assert started.stdout is not None
        line = started.stdout.readline()
        assert line == b"ready\n", f"the viewers did not start: {line!r}"
        yield started


# --- the viewers, as a process of their own -------------------------------------------------------


def _request(run_id: str) -> bytes:
    return f"GET /api/runs/{run_id}/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode()


async def view(port: int, run_id: str, count: int) -> None:
    """Read live streams until this process is ended."""
    places = asyncio.Semaphore(_OPENED_AT_ONCE)
    async with asyncio.timeout(_CONNECT):
        readers = await asyncio.gather(*(_opened(port, run_id, places) for _ in range(count)))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.gather(*(_read_on(reader) for reader, _ in readers))


async def _opened(
    port: int, run_id: str, places: asyncio.Semaphore
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with places:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        writer.write(_request(run_id))
        await writer.drain()
        while not (await reader.readline()).startswith(b"data: "):
            if reader.at_eof():
                raise ConnectionError("the dashboard closed a stream")
    return reader, writer


async def _read_on(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


if __name__ == "__main__":
    asyncio.run(view(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
