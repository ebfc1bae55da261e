"""Events per second folded by the live reducer, compared with the client alone."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from itertools import islice
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]

from trinity_events.archive import Archive
from trinity_events.log import Stream

from .environment import (
    START_DEADLINE,
    Filled,
    Stage,
    answer_of,
    fill,
    process,
    reducer,
    reset_run,
    rest,
    wait_for_position,
)
from .event_mix import MIX, training
from .measure import Findings, Noise, Rounds, Row, median, ratio, say, spread, taking_turns
from .report import SPEED

TITLE = "events a second, folded by the reducer in its own process"
PLACE = SPEED
RUN = "bench-fold"
FILLED = "bench:events"
FOR_FASTSTREAM = "bench:faststream"

LIVE, BARE = "live reducer", "reducer without an archive"
LOOP, RAW_LOOP = "client's read and decode loop", "the same loop in the reducer's way"
FOLLOWER, MEMBER = "FastStream subscriber", "FastStream subscriber in a group"

OF_THE_LOOP = Rounds("at least", 0.6)
OF_FASTSTREAM = Rounds("at least", 30)


class Size(NamedTuple):
    """Entries and rounds of each log, the entries for FastStream, and the expected duration."""

    logs: tuple[tuple[int, int], ...]
    faststream: int
    takes: str


SIZES = {
    "tiny": Size(((12_000, 1),), 300, "10 s"),
    "small": Size(((55_000, 3),), 3_000, "1 min"),
    "full": Size(((55_000, 5), (505_000, 3)), 5_000, "3 min"),
}


class Timings(NamedTuple):
    """Measurements of one contender on one log."""

    entries: float
    seconds: float
    cpu: float
    archived: int = 0
    """Entries in archive files when the last one was folded."""
    later: int = 0
    """Entries archived after that."""
    later_cpu: float = 0.0
    """CPU seconds for these, including all other work of the process."""

    @property
    def a_second(self) -> float:
        """Entries per second."""
        return self.entries / self.seconds

    @property
    def cpu_microseconds(self) -> float:
        """CPU microseconds of its process per entry."""
        return self.cpu / self.entries * 1e6


Contender = Callable[[], Timings]
Results = dict[str, list[Timings]]


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure log by log; FastStream only with the first log, since it is slow."""
    rows: list[Row] = []
    notes = [f"The events: {MIX}."]
    for number, (entries, rounds) in enumerate(size.logs):
        say(f"filling a log with {entries:,} entries")
        filled = fill(on.client, FILLED, islice(training(RUN), entries))
        contenders: dict[str, Contender] = {
            LIVE: partial(folded, on, filled, partial(reducer, on, RUN)),
            BARE: partial(folded, on, filled, partial(bare_reducer, on)),
            LOOP: partial(decoded, on, "client"),
            RAW_LOOP: partial(decoded, on, "log"),
        }
        if number == 0 and find_spec("faststream") is None:
            notes.append("FastStream was left out: it is not installed (make setup).")
        elif number == 0:
            contenders |= faststream(on, size.faststream)
        results = taking_turns(contenders, rounds, noise)
        notes.append(archiving(results[LIVE], entries))
        rows += [*speed_rows(results, entries), *cpu_rows(results, entries)]
        on.client.delete(FILLED)
    notes += [
        f"An entry has {filled.bytes / filled.entries:.0f} bytes on average.",
        "The CPU is that of the one process, without the server's.",
        "The loop calls the client as anyone would, and decodes each entry by itself. The reducer "
        "reads past the client's building of dictionaries and recognises senders that it has met.",
    ]
    return Findings(rows, notes)


def archiving(timings: list[Timings], entries: int) -> str:
    """Return the note on archiving within the figures and after them."""
    archived = min(timing.archived for timing in timings)
    spent = [timing.later_cpu / timing.later * 1e6 for timing in timings if timing.later]
    return (
        f"Of {entries:,} entries the live reducer had archived {archived:,} when it had folded "
        "the last: what was there before it began is folded first. It then archived up to its "
        f"last snapshot and trimmed, at {median(spent) if spent else 0:.1f} µs of CPU an entry."
    )


def speed_rows(results: Results, entries: int) -> list[Row]:
    """Return rows of entries per second for each contender and its peers."""
    pairs: list[tuple[str, str, Rounds | None]] = [
        (LIVE, LOOP, OF_THE_LOOP),
        (BARE, LOOP, None),
        (LIVE, RAW_LOOP, None),
    ]
    # A group stores its position on the server, as the reducer does; a plain subscriber does not.
    held_against: list[tuple[str, Rounds | None]] = [(MEMBER, OF_FASTSTREAM), (FOLLOWER, None)]
    pairs += [(LIVE, peer, target) for peer, target in held_against if peer in results]
    rates = {name: [timing.a_second for timing in timings] for name, timings in results.items()}
    return [
        Row(
            what=f"{ours}, {entries:,} entries",
            figure=f"{median(rates[ours]):,.0f}/s",
            peer=peer,
            peer_figure=f"{median(rates[peer]):,.0f}/s",
            ratio=ratio(rates[ours], rates[peer]),
            target=target,
            spread=spread(rates[ours]),
        )
        for ours, peer, target in pairs
    ]


def cpu_rows(results: Results, entries: int) -> list[Row]:
    """Return rows of CPU time, which a busy machine distorts less."""
    used = {
        name: [timing.cpu_microseconds for timing in timings] for name, timings in results.items()
    }
    return [
        Row(
            what=f"CPU of the {ours}, {entries:,} entries",
            figure=f"{median(used[ours]):.1f} µs an entry",
            peer=LOOP,
            peer_figure=f"{median(used[LOOP]):.1f} µs an entry",
            ratio=ratio(used[ours], used[LOOP]),
            spread=spread(used[ours]),
        )
        for ours in results
        if ours not in (LOOP, RAW_LOOP)
    ]


def folded(
    on: Stage,
    filled: Filled,
    reducing: Callable[[], AbstractContextManager[subprocess.Popen[bytes]]],
) -> Timings:
    """Start a reducer on the filled log; the time begins with its first commit."""
    reset_run(on.client, RUN, FILLED)
    # Archived entries would not be archived again.
    shutil.rmtree(on.folder / "checkpoints", ignore_errors=True)
    with reducing() as started:
        process = psutil.Process(started.pid)
        first, began = wait_for_position(on.client, RUN, None, START_DEADLINE)
        before = process.cpu_times()
        _, ended = wait_for_position(on.client, RUN, filled.last_id, filled.entries / 1000 + 30)
        after = process.cpu_times()
        archived_before = archived(on, filled)
        rest(process)
        later, rested = archived(on, filled) - archived_before, process.cpu_times()
    count = filled.entries - 1 - filled.index_of(first)
    if count <= 0:
        raise RuntimeError(f"{filled.entries} entries are folded at once: fill more to time them")
    cpu = after.user + after.system - before.user - before.system
    later_cpu = rested.user + rested.system - after.user - after.system
    return Timings(count, ended - began, cpu, archived_before, later, later_cpu)


def archived(on: Stage, filled: Filled) -> int:
    """Return the number of archived entries."""
    archive = Archive(on.folder / "checkpoints" / RUN, RUN)
    return max(0, filled.index_of(archive.through(Stream.EVENTS)) + 1)


def bare_reducer(on: Stage) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Start the reducer without a checkpoint root."""
    return process("benchmarks.bare_reducer", on.url, RUN, home=on.folder)


def decoded(on: Stage, how: str) -> Timings:
    """Run the loop that only reads and decodes, in a process of its own."""
    reset_run(on.client, RUN, FILLED)
    return Timings(**answer_of("benchmarks.reading", on.url, RUN, how, home=on.folder))


def faststream(on: Stage, entries: int) -> dict[str, Contender]:
    """Return FastStream contenders on the payloads in its own format."""
    from .faststream_peer import FIELD, enveloped

    fill(on.client, FOR_FASTSTREAM, enveloped(islice(training(RUN), entries)), FIELD)
    peer = ("benchmarks.faststream_peer", on.url, FOR_FASTSTREAM, str(entries))

    def consume(*group: str) -> Timings:
        if group:
            on.client.xgroup_destroy(FOR_FASTSTREAM, *group)
        return Timings(**answer_of(*peer, *group, home=on.folder))

    return {FOLLOWER: consume, MEMBER: partial(consume, "members")}
