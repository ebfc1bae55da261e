"""Time and peak memory of weights in a rollout layout of another tensor-parallel size.

Three methods fill the rollout model of every rank from the training layout:

- slices: each rank receives the slices that it lacks, as ``HybridEngine`` does;
- tensors: one full tensor at a time on every rank, of which it cuts its share, as veRL does;
- model: all full tensors on every rank first, then their shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from .environment import Stage
from .measure import Findings, Noise, Row, say, taking_turns
from .megatron_stream import RANKS, VOCABULARY, Size, random_engine, write_config
from .rank_processes import Methods, measure, measured, rows_beside
from .replay import megabytes
from .report import MEGATRON

if TYPE_CHECKING:
    import torch

TITLE = "weights in a rollout layout, by how they get there from the training layout"
PLACE = MEGATRON

CHANGES = {"TP 2 to 1": (2, 1), "TP 1 to 2": (1, 2)}
"""Tensor-parallel ranks of training and of generation."""

SIZES = {
    "tiny": Size(("tiny",), ("TP 2 to 1",), 2, "20 s"),
    "small": Size(("small",), ("TP 2 to 1", "TP 1 to 2"), 3, "1 min"),
    "full": Size(("small", "large"), ("TP 2 to 1", "TP 1 to 2"), 5, "4 min"),
}


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure every method, on models of several sizes, in both directions."""
    del on  # it needs no server
    rows = []
    for model in size.models:
        for change in size.layouts:
            noise.beat()
            say(f"  {model} model from {change}")
            on_rank = partial(measure_all, change=change, rounds=size.rounds)
            rows += rows_of(change, measured(RANKS, partial(write_config, model), on_rank))
    return Findings(
        rows,
        [
            "Two ranks over Gloo, float32, a thread each. A Qwen3 whose embedding is tied and has "
            f"{VOCABULARY:,} rows. Medians of {size.rounds} rounds that take turns.",
            "Memory is rank 0's largest resident set above what it was before, the largest of all "
            "rounds; the rollout model itself is there before.",
        ],
    )


def rows_of(change: str, methods: Methods) -> list[Row]:
    """Return rows that compare slices with each other method."""
    slices = methods["slices"]
    where = f"{megabytes(slices[0].model)}, {change}"
    return [
        row
        for way in ("tensors", "model")
        for row in rows_beside("slices", where, slices, way, methods[way])
    ]


class Target:
    """Rollout model of one rank, filled from full tensors by Hugging Face name."""

    def __init__(self, hybrid: Any, tensor: int) -> None:
        from trinity_workers.engines.megatron.weights import mapping

        self._mapping = mapping(hybrid.engine.config, hybrid.model.config, tensor)
        self._rank, self._parts = hybrid.model.pg_collection.tp.rank(), tensor
        self._sources: dict[str, list[str]] = {}
        self._parameters = dict(hybrid.model.named_parameters())
        self._names: dict[str, str] = {}
        for name in self._parameters:
            for source in self._mapping.huggingface_names(name):
                self._names[source] = name
            self._sources[name] = self._mapping.huggingface_names(name)

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy this rank's share of each parameter, as soon as its tensors are there."""
        arrived: dict[str, torch.Tensor] = {}
        for source, tensor in tensors:
            arrived[source] = tensor
            name = self._names[source]
            if all(part in arrived for part in self._sources[name]):
                whole = self._mapping.to_megatron(
                    name, [arrived.pop(part) for part in self._sources[name]]
                )
                parameter = self._parameters[name]
                shards = self._mapping.split(name, whole, parameter, self._parts)
                parameter.data.copy_(shards[self._rank])


def measure_all(rank: int, place: str, folder: str, *, change: str, rounds: int) -> Methods:
    """Measure every method on one rank. Collective."""
    import torch.distributed as dist

    from trinity_workers.engines.megatron import HybridEngine

    before, after = CHANGES[change]
    engine = random_engine(rank, place, folder, before, 1)
    hybrid = HybridEngine(engine, after)
    target = Target(hybrid, after)
    nbytes: int = sum(tensor.nbytes for _, tensor in engine.get_per_tensor_param())

    def slices() -> int:
        hybrid.reshard()
        return nbytes

    def tensors() -> int:
        target.fill(engine.get_per_tensor_param())
        return nbytes

    def model() -> int:
        whole = {name: value.clone() for name, value in engine.get_per_tensor_param()}
        target.fill((name, whole[name]) for name in list(whole))
        return nbytes

    ways: dict[str, Callable[[], int]] = {"slices": slices, "tensors": tensors, "model": model}
    with hybrid.resharded():
        for way in ways.values():
            way()  # warm-up
        contenders = {name: partial(measure, way) for name, way in ways.items()}
        methods = taking_turns(contenders, rounds, Noise())
    dist.destroy_process_group()
    return methods
