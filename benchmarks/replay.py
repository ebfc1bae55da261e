"""Replay of a long log: its time, and its memory by length of the log."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import NamedTuple

from trinity_schemas import RunKeys

from .environment import Spent, Stage, answer_of, fill, list_run, spent_by
from .event_mix import MIX, training
from .measure import Findings, Noise, Rounds, Row, median, ratio, say, spread, taking_turns
from .report import SPEED

TITLE = "seconds and memory of trinity-events replay"
PLACE = SPEED
CONSTANT = Rounds("at most", 1.2)
RUN, FILE, EXPORT, LOOP = "replay RUN", "replay FILE", "export RUN", "read and decode loop"


class Size(NamedTuple):
    """Entries of the short and the long log, rounds over each, and the expected duration."""

    short: int
    long: int
    rounds: int
    takes: str


SIZES = {
    "tiny": Size(500, 20_000, 1, "10 s"),
    "small": Size(10_000, 100_000, 2, "20 s"),
    "full": Size(100_000, 1_000_000, 3, "3 min"),
}


class Log(NamedTuple):
    """Measurements of the commands on a log of one length, and the loop's entries per second."""

    entries: int
    spent: dict[str, list[Spent]]
    loops: list[float]


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Replay a short log and one of ten times the length, from the server and from a file."""
    short = measured(on, size.short, size.rounds, noise, beside_loop=False)
    long = measured(on, size.long, size.rounds, noise, beside_loop=True)
    rows: list[Row] = []
    for name in (RUN, FILE, EXPORT):
        rows += [speed_row(name, short, long), memory_row(name, short, long)]
    notes = [
        f"The events: {MIX}.",
        "Events a second are those of the long log less those of the short one, so that starting "
        "up does not count. Memory is the largest resident set that the process was seen to have, "
        "every 20 ms.",
    ]
    return Findings(rows, notes)


def measured(on: Stage, entries: int, rounds: int, noise: Noise, *, beside_loop: bool) -> Log:
    """Fill a log, export it, and replay both, by turns with the loop that only decodes."""
    run_id = f"bench-replay-{entries}"
    say(f"filling a log with {entries:,} entries, and exporting it")
    fill(on.client, RunKeys.of(run_id).events, islice(training(run_id), entries))
    list_run(on.client, run_id)
    file = str(on.folder / f"{run_id}.jsonl")
    spent: dict[str, list[Spent]] = {RUN: [], FILE: [], EXPORT: []}

    def command(name: str, *arguments: str) -> float:
        spent[name].append(spent_by("trinity_events", *arguments, home=on.folder))
        return spent[name][-1].seconds

    def loop() -> float:
        answer = answer_of("benchmarks.reading", on.url, run_id, "client", home=on.folder)
        return float(answer["entries"] / answer["seconds"])

    command(EXPORT, "export", run_id, "--output", file, "--redis-url", on.url)
    contenders: dict[str, Callable[[], float]] = {
        RUN: partial(command, RUN, "replay", run_id, "--no-timeline", "--redis-url", on.url),
        FILE: partial(command, FILE, "replay", file, "--no-timeline"),
    }
    if beside_loop:
        contenders[LOOP] = loop
    return Log(entries, spent, taking_turns(contenders, rounds, noise).get(LOOP, []))


def speed_row(name: str, short: Log, long: Log) -> Row:
    """Return the row of events per second, with the read and decode loop as the peer."""
    more = long.entries - short.entries
    pairs = zip(long.spent[name], short.spent[name], strict=True)
    rates = [more / (longer.seconds - shorter.seconds) for longer, shorter in pairs]
    loops = long.loops[: len(rates)]
    seconds = median([spent.seconds for spent in long.spent[name]])
    return Row(
        what=f"{name}, {long.entries:,} entries, {seconds:.1f} s",
        figure=f"{median(rates):,.0f}/s",
        peer=LOOP,
        peer_figure=f"{median(loops):,.0f}/s",
        ratio=ratio(rates, loops),
        spread=spread(rates),
    )


def memory_row(name: str, short: Log, long: Log) -> Row:
    """Return the row of peak memory, with the shorter log as the peer."""
    peak, short_peak = (
        median([spent.peak_bytes for spent in log.spent[name]]) for log in (long, short)
    )
    return Row(
        what=f"{name}, peak memory, {long.entries:,} entries",
        figure=megabytes(peak),
        peer=f"{short.entries:,} entries",
        peer_figure=megabytes(short_peak),
        ratio=peak / short_peak,
        target=CONSTANT,
    )


def megabytes(count: float) -> str:
    """Format bytes as megabytes."""
    return f"{count / 1e6:,.1f} MB"
