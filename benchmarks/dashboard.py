"""Dashboard of a long log: time until it opens, time of a scrub, and memory."""

from __future__ import annotations

import http.client
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]

from trinity_events.core import MonitorState, encode_state
from trinity_events.core.fold import Monitor
from trinity_events.dashboard.simulated_run import Plan, simulated_run
from trinity_events.log.position import ORIGIN
from trinity_schemas import EnvelopeReader, RunKeys

from .dashboard_browser import InBrowser, has_browser, in_browser
from .environment import HERE, Stage, list_run
from .measure import Findings, Noise, Row, median, say, spread
from .report import SPEED

TITLE = "the dashboard of a long log"
PLACE = SPEED
RUN = "bench-dashboard"
_DEADLINE = 600.0
_PAGE = 1000


class Size(NamedTuple):
    """Events of the log, workers, scrubs that are timed, and the expected duration."""

    events: int
    workers: int
    scrubs: int
    takes: str


SIZES = {
    "tiny": Size(5_000, 16, 10, "15 s"),
    "small": Size(100_000, 200, 40, "1 min"),
    "full": Size(1_000_000, 1_000, 200, "5 min"),
}


class Measured(NamedTuple):
    """Measurements of a dashboard of one log."""

    opened: float
    """Seconds from the first question to the newest state, the lanes and the whole run's strip."""
    indexed: float
    """Seconds until every entry of the log is indexed."""
    scrubs: list[float]
    peak_bytes: int
    browser: InBrowser | None
    """None without a browser."""


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Open a short log and one of ten times the length, and scrub through both."""
    short = measured(on, size.events // 10, size, noise)
    long = measured(on, size.events, size, noise)
    events, before = f"{size.events:,} events", f"{size.events // 10:,} events"
    rows = [
        _row(f"open the page of {events} (s)", long.opened, before, short.opened),
        _row(f"index {events} (s)", long.indexed, before, short.indexed),
        _row(
            f"scrub to an event of {events}, median (ms)",
            1000 * median(long.scrubs),
            before,
            1000 * median(short.scrubs),
            spread(long.scrubs),
        ),
        _row(
            f"scrub to an event of {events}, slowest of {size.scrubs} (ms)",
            1000 * max(long.scrubs),
            before,
            1000 * max(short.scrubs),
        ),
        _row(
            f"memory of the dashboard of {events} (MB)",
            long.peak_bytes / 1e6,
            before,
            short.peak_bytes / 1e6,
        ),
    ]
    rows += _rows_of_browser(long, short, events, before)
    notes = [
        f"A simulated run of {size.workers:,} workers. The page is open once the newest state, the "
        "lanes and the strip of the whole run are answered; the past fills in while it is indexed. "
        "Opening is asked to take at most 3 s, and the median scrub 100 ms.",
        "A scrub is one question over HTTP for the state after a random event. Memory is the "
        "largest resident set of the process.",
        "In a browser (Chromium without a window, which draws on the processor), the newest state "
        "and the timeline of the last steps are painted before the log is indexed. Frames are "
        "those of 60 turns of the wheel and 60 moves of the pointer over the timeline.",
    ]
    return Findings(rows, notes)


def _rows_of_browser(long: Measured, short: Measured, events: str, before: str) -> list[Row]:
    if long.browser is None or short.browser is None:
        return [Row(what="pages in a browser", figure="no browser is at hand")]
    ours, theirs = long.browser, short.browser
    return [
        _row(f"paint the page of {events} in a browser (s)", ours.painted, before, theirs.painted),
        _row(
            f"frame while the timeline of {events} moves, median (ms)",
            median(ours.zoom),
            before,
            median(theirs.zoom),
        ),
        _row(
            f"frame while the timeline of {events} moves, slowest (ms)",
            max(ours.zoom),
            before,
            max(theirs.zoom),
        ),
        _row(
            f"scrub to an event of {events} in a browser, median (ms)",
            1000 * median(ours.scrubs),
            before,
            1000 * median(theirs.scrubs),
            spread(ours.scrubs),
        ),
    ]


def _row(what: str, value: float, peer: str, peers: float, varies: float | None = None) -> Row:
    return Row(
        what=what,
        figure=f"{value:,.3g}",
        peer=peer,
        peer_figure=f"{peers:,.3g}",
        ratio=value / peers,
        spread=varies,
    )


def measured(on: Stage, events: int, size: Size, noise: Noise) -> Measured:
    """Put a log on the server, with a reducer's snapshot, and open its dashboard."""
    run_id = f"{RUN}-{events}"
    say(f"filling a log with {events:,} events of {size.workers} workers")
    last = put(on, run_id, events, size.workers)
    list_run(on.client, run_id)
    noise.beat()
    with dashboard(on) as (port, process):
        began = time.perf_counter()
        while ask(port, run_id, "now")["position"] != last:
            time.sleep(0.02)
        ask(port, run_id, "lanes")
        ask(port, run_id, "overview")
        opened = time.perf_counter() - began
        until_indexed(port, run_id)
        indexed = time.perf_counter() - began
        draw = random.Random(events)
        scrubs = [scrub(port, run_id, draw.randint(1, events)) for _ in range(size.scrubs)]
        peak = process.memory_info().rss
    browser = None
    if has_browser():
        with dashboard(on) as (port, _):
            wait = partial(until_indexed, port, run_id)
            browser = in_browser(port, run_id, events, min(30, size.scrubs), wait)
    return Measured(opened, indexed, scrubs, peak, browser)


def until_indexed(port: int, run_id: str) -> None:
    """Wait until a dashboard has indexed the log of a run. Raises TimeoutError."""
    give_up = time.monotonic() + _DEADLINE
    while ask(port, run_id, "now")["progress"] < 1:
        if time.monotonic() > give_up:
            raise TimeoutError(f"the log was not indexed in {_DEADLINE:.0f} s")
        time.sleep(0.2)


def put(on: Stage, run_id: str, events: int, workers: int) -> str:
    """Append the events of a simulated run, and the snapshot of its state; return the last id."""
    ranks = max(2, workers // 16)
    plan = Plan(run_id=run_id, ranks=ranks, explorers=workers - ranks, steps=10**6, faults=False)
    entries = islice(simulated_run(plan), events)
    keys, last = RunKeys.of(run_id), ORIGIN
    monitor, decode = Monitor(MonitorState(run_id=run_id)), EnvelopeReader().decode
    while page := list(islice(entries, _PAGE)):
        with on.client.pipeline(transaction=False) as pipe:
            for entry in page:
                pipe.xadd(keys.events, {"e": entry.payload}, id=entry.id)
            pipe.execute()
        monitor.fold(page, decode)
        last = page[-1].id
    on.client.mset({keys.snapshot: encode_state(monitor.state), keys.position: last})
    return last


@contextmanager
def dashboard(on: Stage) -> Iterator[tuple[int, psutil.Process]]:
    """Run a dashboard of the stage's server; yield its port and its process."""
    arguments = ["dashboard", "--port", "0", "--redis-url", on.url]
    with ExitStack() as exits:
        started = exits.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "trinity_events", *arguments],
                cwd=HERE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        exits.callback(started.terminate)
        assert started.stdout is not None
        match = re.search(r":(\d+)/", started.stdout.readline())
        assert match is not None, "the dashboard did not start"
        yield int(match[1]), psutil.Process(started.pid)


def ask(port: int, run_id: str, name: str) -> Any:
    """Ask a dashboard, and return its answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_DEADLINE)) as connection:
        connection.request("GET", f"/api/runs/{run_id}/{name}")
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        return json.loads(body)


def scrub(port: int, run_id: str, number: int) -> float:
    """Return the seconds until the state after an event is answered."""
    began = time.perf_counter()
    answer = ask(port, run_id, f"at?number={number}")
    assert answer["number"] == number
    return time.perf_counter() - began
