"""Weights through a collective group, compared with a plain broadcast of the same bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from trinity_events.server import EmbeddedServer, open_client
from trinity_events.weights import CollectiveStore, PartRef
from trinity_events.weights.publishing.part_writer import LastLayout
from trinity_events.weights.transports.collective.store import CHUNK_BYTES

from .environment import Stage
from .measure import Noise, Row, taking_turns
from .original_design import LAST
from .transport_peers import Turn, end, row
from .weights_peer import DEADLINE, RUN, Model, Peer, apply, published

WHOLE, APPLIED = (
    "collective group, whole and confirmed at the explorer",
    "collective group, applied",
)
BARE, COPIED = "bare broadcast, in one piece", "bare broadcast, and one copy"
_WARM = 3


class Timed(NamedTuple):
    """Seconds of one version."""

    whole: float
    """Seconds until the other process has all bytes."""
    applied: float
    """Seconds until they are in its model."""


NOTES = (
    "The collective group is of two processes of one machine, over TCP. Ours sends buckets of "
    f"{CHUNK_BYTES >> 20} MiB, digests everything once on each side, and waits for the explorer's "
    "word that it has all of it; the bare broadcast, by torch's own Gloo, digests nothing.",
)


def measured(on: Stage, turn: Turn, noise: Noise) -> list[Row]:
    """Measure one model."""
    with (
        EmbeddedServer(on.folder, "weights", durable=False).attached() as url,
        end(serve, turn.model, url, on.folder / f"bare-{time.time_ns()}") as other,
        sender(turn.model, url, other) as store,
    ):
        source, flat = turn.model.parameters(1.0), torch.ones(turn.model.nbytes, dtype=torch.uint8)
        steps, layout = count(1), LastLayout()

        def ours() -> Timed:
            step = next(steps)
            number = float(1 + step % 100)
            source[LAST][-1] = number
            began = time.perf_counter()
            ready = published(store, PartRef(RUN, 1, step, 0), source, layout)
            whole = time.perf_counter() - began
            applied_number = other.ask("apply", ready)
            applied = time.perf_counter() - began
            if applied_number != number:
                raise RuntimeError(f"through the group {applied_number} was applied, not {number}")
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
        timings = taking_turns(them, turn.rounds, noise)
    whole = {name: [timed.whole for timed in timings[name]] for name in them}
    applied = {name: [timed.applied for timed in timings[name]] for name in them}
    return [
        row(turn, WHOLE, whole["ours"], BARE, whole["bare"]),
        row(turn, APPLIED, applied["ours"], COPIED, applied["bare"]),
    ]


@contextmanager
def sender(model: Model, url: str, other: Peer) -> Iterator[CollectiveStore]:
    """Yield the store of the trainer's rank 0, in both groups."""
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


def serve(requests: Connection, model: Model, url: str, meeting: Path) -> None:
    """Answer requests until the pipe is closed."""
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
