"""Memory of the reducer and of the server after a short and after a very long run."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import redis

from trinity_schemas import RunKeys

from .environment import START_DEADLINE, Filled, Filler, Stage, reducer, rest, wait_for_position
from .event_mix import MIX, length, training
from .measure import Findings, Noise, Rounds, Row, say
from .replay import megabytes
from .report import SPEED

TITLE = "memory of the reducer and of the server, by steps of the run"
PLACE = SPEED
RUN = "bench-growth"
AHEAD = 20_000
"""Maximum entries that wait to be folded, so that no backlog is measured."""
LOOKS, BETWEEN = 4, 90
"""Samples per figure, and steps between two samples; together one period between snapshots."""
STEADY = Rounds("at most", 1.2)


class Size(NamedTuple):
    """Steps at which memory is sampled, settling samples before them, and the expected duration."""

    steps: tuple[int, ...]
    settling: int
    takes: str


SIZES = {
    "tiny": Size((100, 1_000), 0, "5 s"),
    "small": Size((1_000, 3_000, 10_000), 8, "45 s"),
    "full": Size((1_000, 10_000, 100_000), 8, "1 to 2 min"),
}


class Memory(NamedTuple):
    """Memory after a number of steps."""

    steps: int
    events: int
    reducer: int
    server: int
    behind: int
    """Entries on the server when the last one was folded."""
    remaining: int
    """Entries on the server once the reducer is idle, between two snapshots."""


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Feed a run to a live reducer that archives and trims, and sample the memory.

    The positions of snapshots and segments vary, and the number of entries on the server varies
    with them. So before each set of samples the run continues at the pace of the samples, until its
    segments are those of that pace. Then the samples of every size are comparable.
    """
    # The server keeps a limited log of slow commands; those of the filling are no growth.
    client: Any = on.client
    client.config_set("slowlog-max-len", 0)
    feed = Feed(on)
    seen: list[Memory] = []
    with reducer(on, RUN) as started:
        for steps in size.steps:
            noise.beat()
            say(f"  up to step {steps:,}, event {length(steps):,}")
            looks = []
            for look in range(size.settling + LOOKS):
                feed.up_to(length(steps + look * BETWEEN))
                looks.append(looked(on, started.pid, steps))
            seen.append(most_of(looks[-LOOKS:])._replace(behind=looks[0].behind))
    notes = [
        f"The events: {MIX}. Archive and trimming are on.",
        "Memory is the reducer's resident set and the server's used memory, once nothing is left "
        f"to do: the most of {LOOKS} looks, {BETWEEN} steps apart, over one whole period, since "
        f"what is not archived yet goes up and down. They begin {size.settling * BETWEEN} steps "
        "later, when the segments are those of that pace.",
        "Fed as fast as it folds. Entries on the server when the last was folded, and at most "
        "between two snapshots: "
        + ", ".join(f"{o.behind:,} and {o.remaining:,} after {o.steps:,} steps" for o in seen)
        + ".",
    ]
    return Findings(rows_of(seen), notes)


class Feed:
    """Feed that appends the run's events as fast as they are folded."""

    def __init__(self, on: Stage) -> None:
        self._client = on.client
        self._filler = Filler(on.client, RunKeys.of(RUN).events)
        self._events = training(RUN)

    def up_to(self, count: int) -> None:
        """Append until there are ``count`` events in all, and wait until they are folded."""
        filler = self._filler
        while filler.filled.entries < count:
            page = min(1000, count - filler.filled.entries)
            keep_pace(self._client, filler.add(islice(self._events, page)))
        wait_for_position(self._client, RUN, filler.filled.last_id, START_DEADLINE)


def most_of(looks: list[Memory]) -> Memory:
    """Return the maximum of several samples, for each kind of memory."""
    return looks[0]._replace(
        reducer=max(sample.reducer for sample in looks),
        server=max(sample.server for sample in looks),
        remaining=max(sample.remaining for sample in looks),
    )


def keep_pace(client: redis.Redis, filled: Filled) -> None:
    """Wait while too many entries are not folded yet."""
    give_up = time.monotonic() + START_DEADLINE
    key = RunKeys.of(RUN).position
    while True:
        stored: Any = client.get(key)
        folded = filled.index_of(stored.decode()) + 1 if stored else 0
        if filled.entries - folded <= AHEAD:
            return
        if time.monotonic() > give_up:
            raise TimeoutError(f"the reducer has folded {folded:,} of {filled.entries:,} entries")
        time.sleep(0.02)


def looked(on: Stage, pid: int, steps: int) -> Memory:
    """Return the memory once all entries are archived and trimmed."""
    client: Any = on.client
    process = psutil.Process(pid)
    behind = client.xlen(RunKeys.of(RUN).events)
    rest(process)
    return Memory(
        steps=steps,
        events=length(steps),
        reducer=process.memory_info().rss,
        server=on.server["used_memory"],
        behind=behind,
        remaining=client.xlen(RunKeys.of(RUN).events),
    )


def rows_of(seen: list[Memory]) -> list[Row]:
    """Return rows that compare each sample with the first."""
    first, *later = seen
    return [
        Row(
            what=f"memory of the {who}, {sample.steps:,} steps, {sample.events:,} events",
            figure=megabytes(getattr(sample, who)),
            peer=f"{first.steps:,} steps",
            peer_figure=megabytes(getattr(first, who)),
            ratio=getattr(sample, who) / getattr(first, who),
            target=STEADY,
        )
        for who in ("reducer", "server")
        for sample in later
    ]
