"""Time from the first byte published to the last byte applied in another process."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trinity_events.server import EmbeddedServer

from .environment import Stage
from .measure import Findings, Noise, Rounds, Row, median, say, spread, taking_turns
from .original_design import WeightsThroughRay
from .report import PERFORMANCE
from .transport_peers import figure, row
from .weights_consumers import consumer_rows
from .weights_contenders import Contenders, Timed, contenders
from .weights_peer import BLOCK, Model, peer

TITLE = "weights, from publish to applied in another process"
PLACE = PERFORMANCE
_WARM = 3

LIMIT = Rounds("at least", 0.75)
BEATEN = Rounds("at least", 1.0)
ORIGINAL = Rounds("at least", 25)
CAREFUL = Rounds("at least", 1.5)
TORCH = Rounds("at least", 0.5)
"""At most twice torch's own two copies, which check nothing, as a ratio of speeds."""
COPIES = "torch's own two copies"
AT_REST = "shared memory, into a model at rest"
SNAPSHOT = Rounds("at least", 0.77)
"""At most 1.3 copies, as a ratio of speeds."""


class Turn(NamedTuple):
    """Model, its rounds, and its rounds of the paths through Ray."""

    name: str
    model: Model
    rounds: int
    original: int
    consumers: int = 0
    """Maximum concurrent consumers, if they are measured."""
    alone: bool = False
    """If True, only our path is measured, since memory has no room for others."""


class Size(NamedTuple):
    """Models, and the expected duration."""

    turns: tuple[Turn, ...]
    takes: str


SIZES = {
    "tiny": Size((Turn("1 MiB in 20 tensors", Model(20, 26_214), 2, 0),), "10 s"),
    "small": Size(
        (
            Turn("64 MiB in 200 tensors", Model(200, 167_772), 5, 2, consumers=2),
            Turn("2,000 small tensors", Model(2_000, 1_024), 5, 0),
        ),
        "1 min",
    ),
    "full": Size(
        (
            Turn("64 MiB in 200 tensors", Model(200, 167_772), 15, 10),
            Turn("512 MiB in 200 tensors", Model(200, 1_342_177), 10, 10, consumers=8),
            Turn("4 GiB in 200 tensors", Model(200, 10_737_418), 10, 0, alone=True),
            Turn("20,000 small tensors", Model(20_000, 1_024), 10, 0),
        ),
        "5 min",
    ),
}


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure each model's transports by turns."""
    rows: list[Row] = []
    totals: list[tuple[Model, float]] = []
    missing = find_spec("ray") is None
    with EmbeddedServer(on.folder, "weights", durable=False).attached() as url:
        for turn in size.turns:
            say(f"  {turn.name}")
            if turn.alone:
                measurement = measured_alone(turn, url, noise)
            else:
                measurement = measured(turn, url, noise, original=0 if missing else turn.original)
            rows += measurement.rows
            totals.append((turn.model, measurement.seconds))
            if turn.consumers:
                rows += consumer_rows(turn.name, turn.model, turn.consumers, url, turn.rounds)
    if len(totals) > 1:
        rows.append(fitted(totals))
    return Findings(rows, notes_of(size, missing=missing))


class Measured(NamedTuple):
    """Rows of one model, and the median seconds of a version through shared memory."""

    rows: list[Row]
    seconds: float


def measured(turn: Turn, url: str, noise: Noise, original: int) -> Measured:
    """Measure one model."""
    bare = Path("/dev/shm") / f"trinity-bench-{time.time_ns()}"
    try:
        with peer(turn.model, url, bare) as other, contenders(turn.model, other, url, bare) as them:
            for contender in them.values():
                for _ in range(_WARM):
                    contender()
            timings = taking_turns(them, turn.rounds, noise)
            rows = rows_of(turn, timings)
            if original:
                with WeightsThroughRay(turn.model) as path:
                    all_of_them = {
                        "original": lambda: Timed(path.sync()),
                        "careful": lambda: Timed(path.sync_with_care()),
                        "shm": them["shm"],
                        "shm, at rest": them["shm, at rest"],
                    }
                    for warm in (path.sync_with_care, them["shm"], them["shm, at rest"]):
                        warm()
                    rows += ray_rows(turn, taking_turns(all_of_them, original, noise))
            return Measured(rows, median([timed.all for timed in timings["shm"]]))
    finally:
        bare.unlink(missing_ok=True)


def measured_alone(turn: Turn, url: str, noise: Noise) -> Measured:
    """Measure one model through shared memory alone, with one version kept."""
    with peer(turn.model, url, None) as other:
        ours = Contenders(turn.model, [other], url, versions=1)
        try:
            path = {"shm": lambda: ours.through("shm", along=True)}
            for _ in range(_WARM):
                path["shm"]()
            timings = taking_turns(path, turn.rounds, noise)["shm"]
        finally:
            ours.close()
    times, stall = [timed.all for timed in timings], [timed.publish for timed in timings]
    rows = [
        Row(what=f"{turn.name}, {what}", figure=figure(turn.model, took), spread=spread(took))
        for what, took in (("shared memory", times), ("stall while it is published", stall))
    ]
    return Measured(rows, median(times))


def rows_of(turn: Turn, timings: dict[str, list[Timed]]) -> list[Row]:
    """Return rows that compare shared memory with each other path, by speed."""
    times = {name: [timed.all for timed in all_of_it] for name, all_of_it in timings.items()}
    stall = [timed.publish for timed in timings["shm"]]
    ours, bare, copied = times["shm"], times["pipeline"], times["copy"]
    rows = [
        row(turn, "shared memory", ours, "bare two-process pipeline", bare, LIMIT),
        row(turn, "shared memory", ours, "one memory copy", copied),
        row(turn, "shared memory", ours, "begun when announced", times["shm, announced first"]),
        row(turn, "shared memory", ours, "the same without digests", times["shm, no digests"]),
        row(turn, "shared memory", ours, "Redis", times["redis"]),
        row(turn, AT_REST, times["shm, at rest"], "bare two-process pipeline", bare, LIMIT),
        row(
            turn,
            "shared memory, served where it lies",
            times["shm, in place"],
            "bare two-process pipeline",
            bare,
            BEATEN,
        ),
        row(turn, "stall while it is published", stall, "one memory copy", copied),
        row(turn, "stall of a snapshot", times["snapshot"], "one memory copy", copied, SNAPSHOT),
    ]
    if "torch" in times:
        rows.append(row(turn, "shared memory", ours, COPIES, times["torch"], TORCH))
    return rows


def ray_rows(turn: Turn, timings: dict[str, list[Timed]]) -> list[Row]:
    """Return rows that compare shared memory with both paths through Ray, round by round."""
    times = {name: [timed.all for timed in all_of_it] for name, all_of_it in timings.items()}
    return [
        row(turn, what, times[way], peer, times[theirs], target)
        for peer, theirs, target in (
            ("the original's path", "original", ORIGINAL),
            ("Ray, used with care", "careful", CAREFUL),
        )
        for what, way in (("shared memory", "shm"), (AT_REST, "shm, at rest"))
    ]


def fitted(totals: list[tuple[Model, float]]) -> Row:
    """Fit the cost per tensor: time = a * tensors + bytes / bandwidth."""
    sizes = np.array([[model.tensors, model.nbytes] for model, _ in totals], float)
    (a, per_byte), *_ = np.linalg.lstsq(
        sizes, np.array([seconds for _, seconds in totals]), rcond=None
    )
    return Row(
        what="fit over these models: a tensor, whatever its size",
        figure=f"{a * 1e6:.2f} µs, and {1 / per_byte / (1 << 30):.2f} GiB/s",
    )


def notes_of(size: Size, *, missing: bool) -> list[str]:
    """Return the notes for readers of the figures."""
    notes = [
        "Tensors are bf16. Ratios are of speeds: above 1, shared memory is faster. Rounds: "
        + ", ".join(f"{turn.rounds} of {turn.name}" for turn in size.turns)
        + ".",
        f"The bare pipeline copies {BLOCK >> 20} MiB at a time into a mapped file while the other "
        "process copies the last ones out of it, in one flat piece each, and checks nothing.",
        "Shared memory: the other process digests chunks while they are written, and copies them "
        "into its model once the version is announced. Begun when announced: it does both only "
        "then. Into a model at rest: it serves no requests, so it takes each chunk as soon as that "
        "is digested. Served where it lies: its model's tensors become the segment's own.",
        "Torch's own two copies, of small tensors, are torch.cat of all into one piece and "
        "torch._foreach_copy_ out of it, in one process; at most twice their time is asked.",
        "A snapshot is a copy of all tensors into memory that is used again; that much is asked to "
        "be at most 1.3 memory copies, which is a ratio of 0.77.",
    ]
    if missing:
        notes.append("The original's path was left out: Ray is not installed (make setup).")
    elif any(turn.original for turn in size.turns):
        notes.append(
            "The original's path is a small model of it: the whole state dict is sent to a Ray "
            "actor, and another fetches it tensor by tensor into its model. Used with care, "
            "tensors are put once, as arrays, and copied from where Ray keeps them. Rounds: "
            + ", ".join(f"{turn.original} of {turn.name}" for turn in size.turns if turn.original)
            + "."
        )
    else:
        notes.append("The original's path was left out at this size.")
    return notes
