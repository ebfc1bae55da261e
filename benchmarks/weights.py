"""From the first byte published to the last one applied in another process."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import NamedTuple

from trinity_events.server import EmbeddedServer
from trinity_events.weights import PartRef, PartWriter
from trinity_schemas import PublishedPart, StepReady, version_digest

from .measure import Asked, Findings, Noise, Row, median, ratio, say, spread, taking_turns
from .original import LAST, WeightsThroughRay
from .report import PERFORMANCE
from .stage import Stage
from .weights_peer import BLOCK, RUN, Model, Peer, mapped_file, peer, store_of, undigested

TITLE = "weights, from publish to applied in another process"
PLACE = PERFORMANCE
KEPT = 2
"""Versions that are there at a time, as in a run."""
_WARM = 3

LIMIT = Asked("at least", 0.75)
ORIGINAL = Asked("at least", 25)


class Turn(NamedTuple):
    """A model, over how many rounds; and in how many of them the original's path too."""

    name: str
    model: Model
    rounds: int
    original: int


class Size(NamedTuple):
    """Models, and how long it takes."""

    turns: tuple[Turn, ...]
    takes: str


SIZES = {
    "tiny": Size((Turn("1 MiB in 20 tensors", Model(20, 26_214), 2, 0),), "10 s"),
    "small": Size(
        (
            Turn("64 MiB in 200 tensors", Model(200, 167_772), 5, 2),
            Turn("2,000 small tensors", Model(2_000, 1_024), 5, 0),
        ),
        "1 min",
    ),
    "full": Size(
        (
            Turn("64 MiB in 200 tensors", Model(200, 167_772), 15, 5),
            Turn("512 MiB in 200 tensors", Model(200, 1_342_177), 10, 3),
            Turn("20,000 small tensors", Model(20_000, 1_024), 10, 0),
        ),
        "8 min",
    ),
}


class Timed(NamedTuple):
    """Seconds of one version."""

    all: float
    publish: float = 0.0
    """Of it, until all was published: how long the training loop is held."""


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure each model's transports in turns."""
    rows: list[Row] = []
    missing = find_spec("ray") is None
    with EmbeddedServer(on.folder, "weights", durable=False).attached() as url:
        for turn in size.turns:
            say(f"  {turn.name}")
            rows += measured(turn, url, noise, original=0 if missing else turn.original)
    return Findings(rows, notes_of(size, missing=missing))


def measured(turn: Turn, url: str, noise: Noise, original: int) -> list[Row]:
    """One model."""
    bare = Path("/dev/shm") / f"trinity-bench-{time.time_ns()}"
    try:
        with peer(turn.model, url, bare) as other, contenders(turn.model, other, url, bare) as them:
            for contender in them.values():
                for _ in range(_WARM):
                    contender()
            found = taking_turns(them, turn.rounds, noise)
            rows = rows_of(turn, found)
            if original:
                with WeightsThroughRay(turn.model) as path:
                    both = {"original": lambda: Timed(path.sync()), "shm": them["shm"]}
                    rows.append(original_row(turn, taking_turns(both, original, noise)))
            return rows
    finally:
        bare.unlink(missing_ok=True)


@contextmanager
def contenders(
    model: Model, other: Peer, url: str, bare: Path
) -> Iterator[dict[str, Callable[[], Timed]]]:
    """What takes turns."""
    source = model.parameters(1.0)
    flat, target = (memoryview(bytearray(model.nbytes)) for _ in range(2))
    mapped = memoryview(mapped_file(bare, model.nbytes, mmap.PROT_READ | mmap.PROT_WRITE))
    stores = {name: store_of(name, url) for name in ("shm", "redis")}
    steps = count()

    def publish(transport: str, *, along: bool = False) -> tuple[StepReady, float]:
        part, began = PartRef(RUN, 1, next(steps), 0), time.perf_counter()
        if along:
            other.say("along", part)
        writer = PartWriter(stores[transport], part)
        for name, tensor in source.items():
            writer.add(name, tensor)
        report = writer.seal()
        seconds = time.perf_counter() - began
        told = PublishedPart(rank=0, manifest_digest=report.manifest_digest, bytes=report.bytes)
        digest = version_digest([(0, report.manifest_digest)])
        ready = StepReady(
            epoch=1,
            step=part.step,
            kind="weights",
            caused_by="1-0",
            parts=(told,),
            version_digest=digest,
        )
        return ready, seconds

    def through(transport: str, *, digests: bool = True, along: bool = False) -> Timed:
        number = float(1 + next(steps) % 100)
        source[LAST][-1] = number
        began = time.perf_counter()
        if digests:
            ready, seconds = publish(transport, along=along)
        else:
            with undigested("publish"):
                ready, seconds = publish(transport)
        applied = other.ask("apply", transport, digests, ready)
        all_of_it = time.perf_counter() - began
        if applied != number:
            raise RuntimeError(f"over {transport} {applied} was applied, not {number}")
        retire(transport, ready.step)
        return Timed(all_of_it, seconds)

    published: dict[str, list[int]] = {name: [] for name in stores}

    def retire(transport: str, newest: int) -> None:
        published[transport].append(newest)
        while len(published[transport]) > KEPT:
            stores[transport].delete(PartRef(RUN, 1, published[transport].pop(0), 0))

    def pipeline() -> Timed:
        began = time.perf_counter()
        other.say("copy")
        for begin in range(0, model.nbytes, BLOCK):
            mapped[begin : begin + BLOCK] = flat[begin : begin + BLOCK]
            other.tell(b"there")
        other.wait()
        return Timed(time.perf_counter() - began)

    def copy() -> Timed:
        began = time.perf_counter()
        target[:] = flat
        return Timed(time.perf_counter() - began)

    try:
        yield {
            "shm": lambda: through("shm", along=True),
            "shm, announced first": lambda: through("shm"),
            "shm, no digests": lambda: through("shm", digests=False),
            "redis": lambda: through("redis"),
            "pipeline": pipeline,
            "copy": copy,
        }
    finally:
        for store in stores.values():
            store.close()


def rows_of(turn: Turn, found: dict[str, list[Timed]]) -> list[Row]:
    """Shared memory beside each of the others, by speed."""
    ours = [one.all for one in found["shm"]]
    shown = figure(turn.model, ours)
    rows = [
        Row(
            what=f"{turn.name}, shared memory",
            figure=shown,
            peer=peer_name,
            peer_figure=figure(turn.model, theirs),
            ratio=ratio(theirs, ours),
            asked=asked,
            spread=spread(ours),
        )
        for peer_name, theirs, asked in (
            ("bare two-process pipeline", [one.all for one in found["pipeline"]], LIMIT),
            ("one memory copy", [one.all for one in found["copy"]], None),
            ("begun when announced", [one.all for one in found["shm, announced first"]], None),
            ("the same without digests", [one.all for one in found["shm, no digests"]], None),
            ("Redis", [one.all for one in found["redis"]], None),
        )
    ]
    stall, copies = [one.publish for one in found["shm"]], [one.all for one in found["copy"]]
    rows.append(
        Row(
            what=f"{turn.name}, of it publishing (the stall)",
            figure=figure(turn.model, stall),
            peer="one memory copy",
            peer_figure=figure(turn.model, copies),
            ratio=ratio(copies, stall),
            spread=spread(stall),
        )
    )
    return rows


def original_row(turn: Turn, found: dict[str, list[Timed]]) -> Row:
    """Shared memory beside the original's path, round by round."""
    ours, theirs = ([one.all for one in found[name]] for name in ("shm", "original"))
    return Row(
        what=f"{turn.name}, shared memory",
        figure=figure(turn.model, ours),
        peer="the original's path",
        peer_figure=figure(turn.model, theirs),
        ratio=ratio(theirs, ours),
        asked=ORIGINAL,
        spread=spread(ours),
    )


def figure(model: Model, seconds: list[float]) -> str:
    """The median, for people."""
    middle = median(seconds)
    return f"{middle * 1000:,.1f} ms, {model.nbytes / middle / (1 << 30):.2f} GiB/s"


def notes_of(size: Size, *, missing: bool) -> list[str]:
    """What a reader should know."""
    notes = [
        "Tensors are bf16. Ratios are of speeds: above 1, shared memory is faster. Rounds: "
        + ", ".join(f"{one.rounds} of {one.name}" for one in size.turns)
        + ".",
        f"The bare pipeline copies {BLOCK >> 20} MiB at a time into a mapped file while the other "
        "process copies the last ones out of it, in one flat piece each, and checks nothing.",
        "All weights are published, announced and only then verified and installed, so about half "
        "the speed of the bare pipeline is the most that two copies one after the other can reach.",
    ]
    if missing:
        notes.append("The original's path was left out: Ray is not installed (make setup).")
    elif any(one.original for one in size.turns):
        notes.append(
            "The original's path is a small model of it: the whole state dict is sent to a Ray "
            "actor, and another fetches it tensor by tensor into its model. Rounds: "
            + ", ".join(f"{one.original} of {one.name}" for one in size.turns if one.original)
            + "."
        )
    else:
        notes.append("The original's path was left out at this size.")
    return notes
