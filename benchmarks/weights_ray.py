"""Weights through Ray's object store, beside the original's path and Ray used with care."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import msgspec

from trinity_events.weights import PartRef, RayStore, load_version
from trinity_schemas import StepReady

from .ends import Turn, row
from .measure import Asked, Noise, Row, taking_turns
from .original import LAST, WeightsThroughRay
from .weights_peer import KEPT, RUN, Model, apply, published

ORIGINAL = Asked("at least", 10)
CAREFUL = Asked("at least", 1.0)
OURS = "Ray's object store"
_VERSIONS = 7
"""Room in Ray's object store: three of ours, what the others put, and what is not freed yet."""
_WARM = 3


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

    def load(self, ready: bytes) -> float:
        """The same into a model that nobody serves from meanwhile."""
        announced = msgspec.msgpack.decode(ready, type=StepReady)
        load_version(self._store, RUN, announced, self._module)
        return float(self._module.get_parameter(LAST).detach()[-1])


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
        """Seconds that one version takes, into a model that serves meanwhile."""
        return self._synced_by(self._taker.apply)

    def sync_at_rest(self) -> float:
        """Seconds that one takes into a model that nobody serves from meanwhile."""
        return self._synced_by(self._taker.load)

    def _synced_by(self, take: Any) -> float:
        import ray

        self._synced += 1
        number = float(1 + self._synced % 100)
        self._source[LAST][-1] = number
        began = time.perf_counter()
        part = PartRef(RUN, 1, self._synced, 0)
        ready = published(self._store, part, self._source.items())
        applied = ray.get(take.remote(msgspec.msgpack.encode(ready)))
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


NOTES = (
    "Through Ray, ours digests everything once on each side; the others digest nothing. The "
    "original's path is a small model of it: the whole state dict is sent to a Ray actor, and "
    "another fetches it tensor by tensor into its model. Used with care, tensors are put once, as "
    "arrays, and copied from where Ray keeps them.",
)


def measured(turn: Turn, noise: Noise) -> list[Row]:
    """One model."""
    with WeightsThroughRay(turn.model, _VERSIONS) as path:
        ours = Ours(turn.model)
        them = {
            "ours": ours.sync,
            "at rest": ours.sync_at_rest,
            "original": path.sync,
            "careful": path.sync_with_care,
        }
        for _ in range(_WARM):
            for name in ("ours", "at rest", "careful"):
                them[name]()
        found = taking_turns(them, turn.rounds, noise)
        ours.close()
    return [
        row(turn, what, found[ours], beside, found[theirs], asked)
        for what, ours in ((OURS, "ours"), (f"{OURS}, into a model at rest", "at rest"))
        for beside, theirs, asked in (
            ("the original's path", "original", ORIGINAL),
            ("Ray, used with care", "careful", CAREFUL),
        )
    ]
