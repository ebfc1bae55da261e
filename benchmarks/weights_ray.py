"""Weights through Ray's object store, compared with the original path and with optimised Ray."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from trinity_events.weights import PartRef, RayStore, load_version
from trinity_events.weights.applying.speculative_load import SpeculativeLoad
from trinity_schemas import StepReady

from .measure import Noise, Rounds, Row, taking_turns
from .original_design import LAST, WeightsThroughRay, placed
from .transport_peers import Turn, row
from .weights_peer import KEPT, RUN, Along, Model, apply, published

if TYPE_CHECKING:
    import torch

ORIGINAL = Rounds("at least", 10)
CAREFUL = Rounds("at least", 1.0)
OURS = "Ray's object store"
PACE = 1 << 30
"""Bytes per second of the paced tensors."""
_VERSIONS = 7
"""Versions for which the object store has space: three of ours, the peers', and unfreed ones."""
_WARM = 3


class Taker:
    """Receiving end of our own path: a Ray actor with a model."""

    def __init__(self, model: Model) -> None:
        import torch

        self._module = torch.nn.ParameterDict(model.parameters())
        self._store = RayStore()
        self._ahead = SpeculativeLoad()
        self._along: Along | None = None

    def along(self, part: PartRef, at_rest: bool) -> None:
        """Begin to prefetch a part."""
        on_part = self._ahead.begin(self._module) if at_rest else None
        self._along = Along(self._store, part, on_part)

    def apply(self, ready: bytes) -> float:
        """Pull and install the announced version; return an element of the last tensor."""
        return apply(self._store, self._module, self._announced(ready), digests=True)

    def load(self, ready: bytes) -> float:
        """Pull the announced version into an idle model; return an element of the last tensor."""
        announced = self._announced(ready)
        filled = load_version(self._store, RUN, announced, self._module, ahead=self._ahead)
        self._ahead.record(self._module, filled.manifests)
        self._ahead.abandon()
        return float(self._module.get_parameter(LAST).detach()[-1])

    def _announced(self, ready: bytes) -> StepReady:
        if self._along is not None:
            self._along.end()
            self._along = None
        return msgspec.msgpack.decode(ready, type=StepReady)


class Ours:
    """Publishing end of our own path."""

    def __init__(self, model: Model, nodes: int) -> None:
        import ray

        self._source = model.parameters()
        self._store = RayStore()
        self._taker = placed(ray.remote(Taker), nodes).remote(model)
        self._parts = deque[PartRef]()
        self._synced = 0

    def sync(self) -> float:
        """Return the seconds of one version, into a model that serves meanwhile."""
        return self._synced_by(self._taker.apply)

    def sync_at_rest(self) -> float:
        """Return the seconds of one version, into an idle model."""
        return self._synced_by(self._taker.load, at_rest=True)

    def sync_paced(self, *, along: bool) -> float:
        """Return the seconds of one version with paced tensors, into an idle model."""
        return self._synced_by(self._taker.load, at_rest=True, along=along, paced=True)

    def _synced_by(
        self, take: Any, *, at_rest: bool = False, along: bool = True, paced: bool = False
    ) -> float:
        import ray

        self._synced += 1
        number = float(1 + self._synced % 100)
        self._source[LAST][-1] = number
        began = time.perf_counter()
        part = PartRef(RUN, 1, self._synced, 0)
        if along:
            self._taker.along.remote(part, at_rest)
        tensors = self._source.items()
        ready = published(self._store, part, at_pace(tensors) if paced else tensors)
        applied = ray.get(take.remote(msgspec.msgpack.encode(ready)))
        seconds = time.perf_counter() - began
        if applied != number:
            raise RuntimeError(f"through Ray {applied} was applied, not {number}")
        self._parts.append(part)
        while len(self._parts) > KEPT:
            self._store.delete(self._parts.popleft())
        return seconds

    def close(self) -> None:
        """Delete the published versions."""
        self._store.close()


def at_pace(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors at the pace of a gather, limited in bytes per second."""
    began, nbytes = time.perf_counter(), 0
    for name, tensor in tensors:
        nbytes += tensor.nbytes
        time.sleep(max(0.0, began + nbytes / PACE - time.perf_counter()))
        yield name, tensor


NOTES = (
    "Through Ray, ours digests everything once on each side; the others digest nothing. The "
    "original's path is a small model of it: the whole state dict is sent to a Ray actor, and "
    "another fetches it tensor by tensor into its model. Used with care, tensors are put once, as "
    "arrays, and copied from where Ray keeps them.",
    "Another node is a second one of Ray's on the same machine: what travels goes from one object "
    "store to the other, over TCP. Tensors come at a pace where they are gathered first: then what "
    "is put travels while others are waited for, into a model at rest.",
)


def measured(turn: Turn, noise: Noise) -> list[Row]:
    """Measure one model, with a receiver on this node and one on another."""
    return [row for nodes in (1, 2) for row in _measured(turn, nodes, noise)]


def _measured(turn: Turn, nodes: int, noise: Noise) -> list[Row]:
    with WeightsThroughRay(turn.model, _VERSIONS, nodes) as path:
        ours = Ours(turn.model, nodes)
        them = {
            "ours": ours.sync,
            "at rest": ours.sync_at_rest,
            "original": path.sync,
            "careful": path.sync_with_care,
        }
        if nodes > 1:
            them["along"] = lambda: ours.sync_paced(along=True)
            them["announced"] = lambda: ours.sync_paced(along=False)
        for _ in range(_WARM):
            for name in ("ours", "at rest", "careful"):
                them[name]()
        seconds = taking_turns(them, turn.rounds, noise)
        ours.close()
    way = OURS if nodes == 1 else f"{OURS}, to another node"
    rows = [
        row(turn, what, seconds[ours], beside, seconds[theirs], target)
        for what, ours in ((way, "ours"), (f"{way}, into a model at rest", "at rest"))
        for beside, theirs, target in (
            ("the original's path", "original", ORIGINAL),
            ("Ray, used with care", "careful", CAREFUL),
        )
    ]
    if nodes > 1:
        paced = f"{way}, tensors that come at 1 GiB/s, read along"
        rows.append(
            row(turn, paced, seconds["along"], "begun when announced", seconds["announced"])
        )
    return rows
