"""Weights through a collective group, beside a bare broadcast of the same bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from trinity_events.server import EmbeddedServer, open_client
from trinity_events.weights import CollectiveStore, PartRef

from .measure import Findings, Noise, Row, median, ratio, say, spread, taking_turns
from .original import LAST
from .report import PERFORMANCE
from .stage import Stage
from .weights_peer import DEADLINE, RUN, Model, Peer, apply
from .weights_redis import published

TITLE = "weights through a collective group (Gloo), from publish to applied in another process"
PLACE = PERFORMANCE
WHOLE, APPLIED = "whole and confirmed at the explorer", "applied"
BARE, COPIED = "bare broadcast, in one piece", "bare broadcast, and one copy"
_BUCKET = 4 << 20
_WARM = 3


class Turn(NamedTuple):
    """A model, and over how many rounds."""

    name: str
    model: Model
    rounds: int


class Size(NamedTuple):
    """Models, and how long it takes."""

    turns: tuple[Turn, ...]
    takes: str


SMALL = Turn("64 MiB in 200 tensors", Model(200, 167_772), 5)
SIZES = {
    "tiny": Size((Turn("1 MiB in 20 tensors", Model(20, 26_214), 2),), "10 s"),
    "small": Size((SMALL,), "15 s"),
    "full": Size(
        (
            SMALL._replace(rounds=15),
            Turn("512 MiB in 200 tensors", Model(200, 1_342_177), 10),
            Turn("20,000 small tensors", Model(20_000, 1_024), 10),
        ),
        "1 min",
    ),
}


class Timed(NamedTuple):
    """Seconds of one version."""

    whole: float
    """Until the other process has all bytes."""
    applied: float
    """Until they are in its model."""


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Send the same bytes both ways, by turns."""
    rows = [row for turn in size.turns for row in measured(on, turn, noise)]
    notes = [
        "Tensors are bf16. Ratios are of speeds: above 1, ours is faster. Ours sends buckets of "
        f"{_BUCKET >> 20} MiB, digests everything once on each side, and waits for the explorer's "
        "word that it has all of it; the bare broadcast digests nothing.",
        "Both are between two processes of one machine, by torch's own Gloo over TCP. "
        "Rounds: " + ", ".join(f"{one.rounds} of {one.name}" for one in size.turns) + ".",
    ]
    return Findings(rows, notes)


def measured(on: Stage, turn: Turn, noise: Noise) -> list[Row]:
    """One model."""
    say(f"  {turn.name}")
    with (
        EmbeddedServer(on.folder, "weights", durable=False).attached() as url,
        explorer(turn.model, url, on.folder / f"bare-{time.time_ns()}") as other,
        sender(turn.model, url, other) as store,
    ):
        source, flat = turn.model.parameters(1.0), torch.ones(turn.model.nbytes, dtype=torch.uint8)
        steps = count(1)

        def ours() -> Timed:
            step = next(steps)
            number = float(1 + step % 100)
            source[LAST][-1] = number
            began = time.perf_counter()
            ready = published(store, PartRef(RUN, 1, step, 0), list(source.items()))
            whole = time.perf_counter() - began
            found = other.ask("apply", ready)
            applied = time.perf_counter() - began
            if found != number:
                raise RuntimeError(f"through the group {found} was applied, not {number}")
            return Timed(whole, applied)

        def bare() -> Timed:
            began = time.perf_counter()
            other.say("bare")
            dist.broadcast(flat, 0)
            other.wait()
            whole = time.perf_counter() - began
            other.ask("copy")
            return Timed(whole, time.perf_counter() - began)

        them = {"ours": ours, "bare": bare}
        taking_turns(them, _WARM, Noise())
        found = taking_turns(them, turn.rounds, noise)
    return [
        _row(turn, WHOLE, BARE, *([one.whole for one in found[name]] for name in them)),
        _row(turn, APPLIED, COPIED, *([one.applied for one in found[name]] for name in them)),
    ]


@contextmanager
def sender(model: Model, url: str, other: Peer) -> Iterator[CollectiveStore]:
    """The trainer's rank 0, in both groups."""
    store = CollectiveStore(open_client(url), RUN, "trainer-0")
    try:
        store.listen(1)
        bare = other.ask("join")
        other.say("bare group")
        dist.init_process_group("gloo", init_method=bare, rank=0, world_size=2)
        other.wait()
        store.set_up(1, 1, DEADLINE)
        yield store
    finally:
        store.close()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def explorer(model: Model, url: str, meeting: Path) -> Iterator[Peer]:
    """The other process, with a model of zeros."""
    processes = get_context("spawn")
    ours, theirs = processes.Pipe()
    arguments = (theirs, model, url, meeting)
    started = processes.Process(target=serve, args=arguments, daemon=True)
    started.start()
    theirs.close()
    try:
        yield Peer(ours)
    finally:
        ours.close()
        started.join(10)
        started.kill()
        started.join()


def serve(requests: Connection, model: Model, url: str, meeting: Path) -> None:
    """Answer until nobody asks any more."""
    module = torch.nn.ParameterDict(model.parameters())
    flat, target = (torch.zeros(model.nbytes, dtype=torch.uint8) for _ in range(2))
    store = CollectiveStore(open_client(url), RUN, "explorer-1")
    where = f"file://{meeting}"
    try:
        while True:
            what, *arguments = requests.recv()
            answer: object = None
            if what == "join":
                store.join()
                answer = where
            elif what == "bare group":
                dist.init_process_group("gloo", init_method=where, rank=1, world_size=2)
            elif what == "apply":
                [ready] = arguments
                answer = apply(store, module, ready, digests=True)
            elif what == "bare":
                dist.broadcast(flat, 0)
            else:
                target.copy_(flat)
            requests.send(answer)
    except EOFError:
        store.close()
        dist.destroy_process_group()


def _row(turn: Turn, what: str, peer: str, ours: list[float], theirs: list[float]) -> Row:
    return Row(
        what=f"{turn.name}, {what}",
        figure=_figure(turn.model, ours),
        peer=peer,
        peer_figure=_figure(turn.model, theirs),
        ratio=ratio(theirs, ours),
        spread=spread(ours),
    )


def _figure(model: Model, seconds: list[float]) -> str:
    middle = median(seconds)
    return f"{middle * 1000:,.1f} ms, {model.nbytes / middle / (1 << 30):.2f} GiB/s"
