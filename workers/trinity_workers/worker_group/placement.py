"""Places of a run's processes in a Ray cluster: one placement group reserves them together."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ..config.train_config import TrainConfig

Bundle = dict[str, float]
"""Resources of one process, as Ray names them."""


class Needs(Struct, frozen=True, kw_only=True):
    """Processes of a run that are placed in a cluster, and the CPUs of each."""

    ranks: int
    rank_cpus: float
    explorers: int
    explorer_cpus: float

    @classmethod
    def for_run(cls, config: TrainConfig, *, explorers: int) -> Needs:
        """Return the needs of a run with this number of explorers in its cluster."""
        return cls(
            ranks=config.trainer.ranks,
            rank_cpus=config.trainer.cpus or 1.0,
            explorers=explorers,
            explorer_cpus=config.explorer.cpus or 1.0,
        )

    @property
    def cpus(self) -> float:
        """CPUs of all processes."""
        return self.ranks * self.rank_cpus + self.explorers * self.explorer_cpus

    def bundles(self, *, gpus: bool) -> list[Bundle]:
        """Return the resources of every rank, then of every explorer.

        The trainer waits while its ranks work: it shares the place of rank 0.
        """
        rank = {"CPU": self.rank_cpus} | ({"GPU": 1.0} if gpus else {})
        explorer = {"CPU": self.explorer_cpus}
        return [dict(rank) for _ in range(self.ranks)] + [
            dict(explorer) for _ in range(self.explorers)
        ]

    def format(self, *, gpus: bool) -> str:
        """Return the needs as text."""
        each = format_count(self.rank_cpus, "CPU") + (" and a GPU" if gpus else "")
        parts = [f"{each} for each of {format_count(self.ranks, 'rank')}"]
        if self.explorers:
            explorers = format_count(self.explorers, "explorer")
            parts.append(f"{format_count(self.explorer_cpus, 'CPU')} for each of {explorers}")
        return ", ".join(parts)


def with_reserved_cpus(config: TrainConfig) -> TrainConfig:
    """Return the configuration for a shared cluster, where no process uses more than its CPUs."""
    needs = Needs.for_run(config, explorers=config.explorers)
    config = config.replaced("trainer", cpus=needs.rank_cpus)
    return config.replaced("explorer", cpus=needs.explorer_cpus)


def has_gpu_each(resources: Mapping[str, float], ranks: int) -> bool:
    """Return True if a cluster of these resources has a GPU for each rank."""
    return resources.get("GPU", 0) >= ranks


def placement_options(group: Any, index: int, **resources: float) -> dict[str, Any]:
    """Return the options of an actor or task in one bundle of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    return {"scheduling_strategy": strategy, **resources}


def rank_options(config: TrainConfig, rank: int) -> tuple[dict[str, Any], bool]:
    """Return the options of a rank's actor, and True if it has a GPU; for the trainer's actor.

    The rank takes all of its bundle in the trainer's placement group. A trainer that is in none
    lets Ray place its ranks.
    """
    import ray

    group: Any = ray.util.get_current_placement_group()
    if group is None:
        total: Any = ray.cluster_resources()  # type: ignore[no-untyped-call]
        gpus = has_gpu_each(total, config.trainer.ranks)
        return {"num_cpus": config.trainer.cpus or 1.0, "num_gpus": int(gpus)}, gpus
    bundle = group.bundle_specs[rank]
    count = bundle.get("GPU", 0)
    return placement_options(group, rank, num_cpus=bundle["CPU"], num_gpus=count), count > 0


def threads(cpus: float | None, sharing: int) -> int:
    """Return the threads of a process: its CPUs, or its share of the host's if none are given."""
    return max(1, math.floor(cpus) if cpus is not None else (os.cpu_count() or 1) // sharing)


def format_count(count: float, what: str) -> str:
    """Return a number of things as text."""
    return f"{count:g} {what}{'' if count == 1 else 's'}"
