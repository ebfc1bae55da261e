"""Weights through Ray's object store, beside the original's path and Ray used with care."""

from __future__ import annotations

import time
from collections import deque
from importlib.util import find_spec
from typing import Any, NamedTuple

import msgspec

from trinity_events.weights import PartRef, RayStore
from trinity_schemas import StepReady

from .measure import Asked, Findings, Noise, Row, median, ratio, say, spread, taking_turns
from .original import LAST, WeightsThroughRay
from .report import PERFORMANCE
from .stage import Stage
from .weights_peer import RUN, Model, apply
from .weights_redis import KEPT, published

TITLE = "weights through Ray, from publish to applied in another process"
PLACE = PERFORMANCE
ORIGINAL = Asked("at least", 10)
CAREFUL = Asked("at least", 1.0)
_VERSIONS = 7
"""Room in Ray's object store: three of ours, what the others put, and what is not freed yet."""
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
    "tiny": Size((Turn("1 MiB in 20 tensors", Model(20, 26_214), 2),), "15 s"),
    "small": Size((SMALL,), "30 s"),
    "full": Size(
        (SMALL._replace(rounds=10), Turn("512 MiB in 200 tensors", Model(200, 1_342_177), 5)),
        "2 min",
    ),
}


class Taker:
    """The other end of our own way: a Ray actor with a model."""

    def __init__(self, model: Model) -> None:
        import torch

        self._module = torch.nn.ParameterDict(model.parameters())
        self._store = RayStore()

    def apply(self, ready: bytes) -> float:
        """Pull and install what was announced; returns a number of the last tensor."""
        announced = msgspec.msgpack.decode(ready, type=StepReady)
        return apply(self._store, self._module, announced, digests=True)


class Ours:
    """This process's end."""

    def __init__(self, model: Model) -> None:
        import ray

        self._source = model.parameters()
        self._store = RayStore()
        taker: Any = ray.remote(Taker).options(num_cpus=0)
        self._taker = taker.remote(model)
        self._kept = deque[PartRef]()
        self._synced = 0

    def sync(self) -> float:
        """Seconds that one version takes."""
        import ray

        self._synced += 1
        number = float(1 + self._synced % 100)
        self._source[LAST][-1] = number
        began = time.perf_counter()
        part = PartRef(RUN, 1, self._synced, 0)
        ready = published(self._store, part, list(self._source.items()))
        applied = ray.get(self._taker.apply.remote(msgspec.msgpack.encode(ready)))
        seconds = time.perf_counter() - began
        if applied != number:
            raise RuntimeError(f"through Ray {applied} was applied, not {number}")
        self._kept.append(part)
        while len(self._kept) > KEPT:
            self._store.delete(self._kept.popleft())
        return seconds

    def close(self) -> None:
        """Let go of what is published."""
        self._store.close()


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure each model's ways through one Ray by turns."""
    if find_spec("ray") is None:
        return Findings([], ["Left out: Ray is not installed (make setup)."])
    rows = [row for turn in size.turns for row in measured(turn, noise)]
    notes = [
        "Tensors are bf16. Ratios are of speeds: above 1, ours is faster. Ours digests everything "
        "once on each side; the others digest nothing.",
        "The original's path is a small model of it: the whole state dict is sent to a Ray actor, "
        "and another fetches it tensor by tensor into its model. Used with care, tensors are put "
        "once, as arrays, and copied from where Ray keeps them.",
        "Rounds: " + ", ".join(f"{one.rounds} of {one.name}" for one in size.turns) + ".",
    ]
    return Findings(rows, notes)


def measured(turn: Turn, noise: Noise) -> list[Row]:
    """One model."""
    say(f"  {turn.name}")
    with WeightsThroughRay(turn.model, _VERSIONS) as path:
        ours = Ours(turn.model)
        them = {"ours": ours.sync, "original": path.sync, "careful": path.sync_with_care}
        for _ in range(_WARM):
            for name in ("ours", "careful"):
                them[name]()
        found = taking_turns(them, turn.rounds, noise)
        ours.close()
    return [
        Row(
            what=f"{turn.name}, Ray's object store",
            figure=_figure(turn.model, found["ours"]),
            peer=peer,
            peer_figure=_figure(turn.model, found[name]),
            ratio=ratio(found[name], found["ours"]),
            asked=asked,
            spread=spread(found["ours"]),
        )
        for name, peer, asked in (
            ("original", "the original's path", ORIGINAL),
            ("careful", "Ray, used with care", CAREFUL),
        )
    ]


def _figure(model: Model, seconds: list[float]) -> str:
    middle = median(seconds)
    return f"{middle * 1000:,.1f} ms, {model.nbytes / middle / (1 << 30):.2f} GiB/s"
