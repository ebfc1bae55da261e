"""Traffic of a version for the log's server, and the hop of reports, by the number of explorers."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from typing import NamedTuple

import anyio
import redis

from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer, open_run
from trinity_events.server import connect
from trinity_schemas import StepCommitted, VersionOpened, VersionPartPublished

from .environment import Stage, Stuck, process, reducer
from .following_explorers import HEARD, LATE, READY
from .latency import milliseconds
from .measure import Findings, Noise, Rounds, Row, median, percentile, say, spread
from .report import SPEED

TITLE = "a weight version for the log's server, by the number of explorers"
PLACE = SPEED
HOWS = ("announcements", "events")
PROCESSES = 2
"""Processes that hold the explorers of a measurement."""
DEADLINE = 300.0
"""Maximum seconds until all explorers follow, and until all have reported a version."""
WARM_UP = 2
LINEAR = Rounds("at most", 1.25)
"""Bytes of an explorer at the largest number over those at the smallest: 1 is linear traffic."""


class Size(NamedTuple):
    """Numbers of explorers, those at which the peer is measured too, and versions of each."""

    explorers: tuple[int, ...]
    peers: tuple[int, ...]
    versions: int
    takes: str


SIZES = {
    "tiny": Size((2, 4), (2, 4), 2, "30 s"),
    "small": Size((64, 256), (64, 256), 6, "2 min"),
    "full": Size((64, 256, 1000), (64, 256), 10, "6 min"),
}


class Versions(NamedTuple):
    """Figures of the versions of one measurement."""

    bytes: list[float]
    """Bytes that the server sent for each version, to all processes."""
    late: list[float]
    """Milliseconds from the event that opens a publication until an explorer heard of it."""

    @property
    def sent(self) -> float:
        """Return the median bytes of a version."""
        return median(self.bytes)


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure each number of explorers, and the design before at the smaller ones."""
    results: dict[tuple[str, int], Versions] = {}
    for count in size.explorers:
        for how in HOWS:
            if how == "announcements" or count in size.peers:
                noise.beat()
                say(f"  {count} explorers that follow {how}")
                results[how, count] = measure(on, how, count, size.versions)
    rows = [row for count in size.explorers for row in _rows(results, count)]
    few, many = size.explorers[0], size.explorers[-1]
    ours, first = (results["announcements", count].sent / count for count in (many, few))
    rows.append(
        Row(
            what=f"bytes of a version for each explorer, {many} explorers",
            figure=_kilobytes(ours),
            peer=f"{few} explorers",
            peer_figure=_kilobytes(first),
            ratio=ours / first,
            target=LINEAR,
        )
    )
    return Findings(rows, _notes(size))


def _rows(results: dict[tuple[str, int], Versions], count: int) -> list[Row]:
    ours, peer = results["announcements", count], results.get(("events", count))
    sent = Row(
        what=f"the server sends for a version, {count} explorers",
        figure=_kilobytes(ours.sent),
        peer="" if peer is None else "following the events",
        peer_figure="" if peer is None else _kilobytes(peer.sent),
        ratio=None if peer is None else ours.sent / peer.sent,
        spread=spread(ours.bytes),
    )
    late = Row(
        what=f"version-opened to its being heard, {count} explorers, median and p99",
        figure=_delay(ours),
        peer="" if peer is None else "following the events",
        peer_figure="" if peer is None else _delay(peer),
        ratio=None if peer is None else median(ours.late) / median(peer.late),
    )
    return [sent, late]


def _delay(versions: Versions) -> str:
    p99 = percentile(versions.late, 0.99)
    return f"{milliseconds(median(versions.late) / 1000)}, {milliseconds(p99 / 1000)}"


def _kilobytes(count: float) -> str:
    return f"{count / 1000:,.1f} kB"


def _notes(size: Size) -> list[str]:
    return [
        f"An explorer is its follower of the run and its publisher, without an engine; {PROCESSES} "
        "processes hold them all. Each reports every version as applied. The reducer, two cores "
        f"and one server are shared. {size.versions} versions of one rank for each number.",
        "Bytes are all that the server sent between two versions: to explorers, to the reducer, "
        "and replies to what was published.",
        "Following the events is a model of the explorers before there were reports: each follows "
        "the whole stream of events twice, for four rare types, and the announcements.",
        "An explorer hears of a publication one hop later: the reducer announces it first. What "
        "explorers of one process wait for one another is in both figures.",
    ]


def measure(on: Stage, how: str, count: int, versions: int) -> Versions:
    """Publish versions to explorers that follow in one way; return their figures."""
    run_id = f"bench-explorers-{how}-{count}"
    on.client.delete(HEARD, LATE)
    with ExitStack() as exits:
        exits.enter_context(reducer(on, run_id))
        epoch = anyio.run(_open, on.url, run_id)
        share = math.ceil(count / PROCESSES)
        for first in range(0, count, share):
            number = str(min(share, count - first))
            words = ("benchmarks.following_explorers", on.url, run_id, str(first), number, how)
            exits.enter_context(process(*words, home=on.folder))
        _wait(on.client, "following", count, f"{count} explorers to follow {run_id}")
        return anyio.run(_publish, on, run_id, epoch, count, versions)


async def _open(url: str, run_id: str) -> int:
    async with connect(url) as client:
        return await open_run(client, run_id)


async def _publish(on: Stage, run_id: str, epoch: int, count: int, versions: int) -> Versions:
    sent: list[float] = []
    async with connect(on.url) as client:
        trainer = AsyncPublisher(RedisEventLog(client, run_id), epoch, new_producer("trainer"))
        for step in range(WARM_UP + versions):
            if step == WARM_UP:
                on.client.delete(LATE)
            before = _sent(on)
            on.client.set(f"{READY}:{step}", time.time())
            await trainer.publish(VersionOpened(step=step, ranks=(0,), transport="redis"))
            await trainer.publish(
                VersionPartPublished(
                    step=step,
                    rank=0,
                    manifest_digest="sha256:" + "0" * 64,
                    bytes=1 << 30,
                    tensors=300,
                    chunks=128,
                )
            )
            await trainer.publish(StepCommitted(step=step, kind="weights"))
            _wait(on.client, str(step), count, f"{count} explorers to report version {step}")
            # The reducer takes the last reports, and the design before reads them.
            await anyio.sleep(0.3)
            sent.append(_sent(on) - before)
    late = on.client.lrange(LATE, 0, -1)
    assert isinstance(late, list)
    return Versions(sent[WARM_UP:], [float(delay) for delay in late])


def _sent(on: Stage) -> float:
    return float(on.server["total_net_output_bytes"])


def _wait(client: redis.Redis, field: str, count: int, what: str) -> None:
    give_up = time.monotonic() + DEADLINE
    while int(client.hget(HEARD, field) or 0) < count:
        if time.monotonic() > give_up:
            raise Stuck(f"waited {DEADLINE:g} s for {what}")
        time.sleep(0.05)
