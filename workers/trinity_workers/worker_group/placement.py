"""Places of a run's processes in a Ray cluster: one placement group reserves them together.

1. No two ranks share a GPU, which NCCL refuses: a rank that shares its GPU with explorers has more
   than half of it.
2. GPUs that the settings ask for are there, or the run is refused before it starts.
3. A process that is started again takes the place, and so the GPU, of the one before it.
4. Where weights travel through a GPU's memory, all processes have shares of one GPU: a process sees
   its own GPU alone, and cannot map the memory of another one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import Any

from msgspec import Struct, structs

from trinity_events.errors import TrinityError
from trinity_events.system.counts import format_count

from ..config.rules.table import find_contradictions
from ..config.sections.trainer import DEFAULT_RANKS
from ..config.train_config import TrainConfig

Bundle = dict[str, float]
"""Resources of one process, as Ray names them."""
SHARED_RANK = 0.6
"""Part of its GPU that a rank takes where explorers share it: above one half, so that no second
rank has room there."""
_RAY_UNIT = 1e-4
"""Smallest part of a resource that Ray counts."""


class GpusMissing(TrinityError):
    """The settings of a run ask for GPUs that are not there.

    Attributes:
        needed: GPUs of each process, as text.
        nodes: Number of GPUs of each node.
        engine: Engine of the trainer whose ranks compute on GPUs alone; None for any other.
        one_gpu: The processes need shares of one GPU, as weights travel through its memory.
    """

    needed: str
    nodes: tuple[float, ...]
    engine: str | None = None
    one_gpu: bool = False
    text = "the run needs {needed}, and {_present}: {_way_out}, or start it where there are more"

    @property
    def _way_out(self) -> str:
        if self.one_gpu:
            return (
                "leave trainer.gpus and explorer.gpus out, choose another sync.transport than "
                "cuda-ipc"
            )
        if self.engine is None:
            return (
                "ask for less with explorer.gpus, trainer.ranks, explorer.count or trainer.gpus (0 "
                "is the CPU)"
            )
        return (
            f"set fewer trainer.ranks, choose another trainer.engine than {self.engine}, which "
            "needs a CUDA device for each rank"
        )

    @property
    def _present(self) -> str:
        if len(self.nodes) == 1:
            verb = "is" if self.nodes[0] == 1 else "are"
            return f"there {verb} {format_count(self.nodes[0], 'GPU')}"
        counts = ", ".join(f"{count:g}" for count in self.nodes)
        return f"the {len(self.nodes)} nodes of the Ray cluster have {counts} GPUs"


class Needs(Struct, frozen=True, kw_only=True):
    """Processes of a run that are placed in a cluster, and the CPUs and GPUs of each."""

    ranks: int
    rank_cpus: float
    explorers: int
    explorer_cpus: float
    rank_gpus: float | None = None
    """GPUs of each rank; None for what :meth:`with_gpus` finds."""
    explorer_gpus: float | None = None
    """GPUs of each explorer; None for what :meth:`with_gpus` finds."""
    explorers_on_gpus: bool = False
    """True if explorers may not be on CPUs."""
    gpu_engine: str | None = None
    """Engine of the trainer that computes on GPUs alone; None if ranks may be on CPUs."""
    one_gpu: bool = False
    """True if rank and explorers need shares of one GPU, through whose memory weights travel."""

    @classmethod
    def for_run(cls, config: TrainConfig, *, explorers: int) -> Needs:
        """Return the needs of a run with this number of explorers in its cluster."""
        return cls(
            ranks=config.trainer.rank_count,
            rank_cpus=config.trainer.cpus or 1.0,
            explorers=explorers,
            explorer_cpus=config.explorer.cpus or 1.0,
            rank_gpus=config.trainer.gpus,
            explorer_gpus=0.0 if config.explorer.device == "cpu" else config.explorer.gpus,
            explorers_on_gpus=config.explorer.device == "cuda",
            gpu_engine=config.trainer.engine if config.trainer.needs_gpus else None,
            one_gpu=explorers > 0 and config.sync.transport == "cuda-ipc",
        )

    @property
    def cpus(self) -> float:
        """CPUs of all processes."""
        return self.ranks * self.rank_cpus + self.explorers * self.explorer_cpus

    @property
    def asks_for_gpus(self) -> bool:
        """Return True if a setting asks for GPUs, which may then be missing."""
        of_explorers = bool(self.explorer_gpus) or self.explorers_on_gpus
        of_ranks = bool(self.rank_gpus) or self.gpu_engine is not None
        return self.one_gpu or of_ranks or (self.explorers > 0 and of_explorers)

    def with_gpus(self, nodes: Sequence[float]) -> Needs:
        """Return the needs with the GPUs of each process, on nodes with these numbers of GPUs.

        What the settings leave open is the first of these that fits: a GPU for each process;
        explorers that share GPUs which ranks leave; explorers that share the ranks' GPUs. Where
        there are fewer GPUs than ranks, these compute on CPUs.

        Raises:
            GpusMissing: if nothing fits that the settings ask for.
        """
        for rank in self._rank_choices(nodes):
            for explorer in self._explorer_choices(rank):
                shares = [rank] * self.ranks + [explorer] * self.explorers
                # Ray packs fractions: those that fit on one GPU come to lie there.
                is_apart = self.one_gpu and (not all(shares) or sum(shares) > 1 + _RAY_UNIT / 2)
                if not is_apart and _fits(nodes, shares):
                    return structs.replace(self, rank_gpus=rank, explorer_gpus=explorer)
        raise GpusMissing(self._format_gpus(), tuple(nodes), self.gpu_engine, self.one_gpu)

    def _rank_choices(self, nodes: Sequence[float]) -> list[float]:
        if self.rank_gpus is not None:
            return [self.rank_gpus]
        if sum(nodes) < self.ranks and self.gpu_engine is None:
            return [0.0]
        # More than half a GPU keeps a second rank off it.
        least = 0.0 if self.ranks == 1 else 0.5
        rests = [1 - (self.explorer_gpus or 0.0) * count for count in range(1, self.explorers + 1)]
        return [1.0, SHARED_RANK, *(round(rest, 4) for rest in rests if rest > least + _RAY_UNIT)]

    def _explorer_choices(self, rank: float) -> list[float]:
        if not self.explorers:
            return [0.0]
        if self.explorer_gpus is not None:
            return [self.explorer_gpus]
        rooms = (1.0, 1 - rank) if 0 < rank < 1 else (1.0,)
        shares = [room / count for room in rooms for count in range(1, self.explorers + 1)]
        # Explorers on CPUs are worse than a rank that shares its GPU, which is tried after this.
        is_last = self.rank_gpus is not None or rank < 1
        on_cpus = [0.0] if is_last and not self.explorers_on_gpus else []
        # Rounded down: as many as share a GPU are to fit in it.
        return [math.floor(share * 1e4) / 1e4 for share in sorted(shares, reverse=True)] + on_cpus

    def _format_gpus(self) -> str:
        if self.one_gpu:
            ranks, explorers = (
                format_count(self.ranks, "rank"),
                format_count(self.explorers, "explorer"),
            )
            return f"one GPU that {ranks} and {explorers} share"
        needs = []
        if self.rank_gpus != 0:
            needs.append((self.rank_gpus, format_count(self.ranks, "rank")))
        if self.explorers:
            needs.append((self.explorer_gpus, format_count(self.explorers, "explorer")))
        return " and ".join(
            f"{'a GPU, or a part of one,' if gpus is None else format_count(gpus, 'GPU')} "
            f"for each of {processes}"
            for gpus, processes in needs
        )

    def bundles(self) -> list[Bundle]:
        """Return the resources of every rank, then of every explorer.

        The trainer waits while its ranks work: it shares the place of rank 0. Ranks come first:
        Ray then gives each of them a GPU of its own, also where explorers share these.
        """
        rank = _make_bundle(self.rank_cpus, self.rank_gpus)
        explorer = _make_bundle(self.explorer_cpus, self.explorer_gpus)
        return [dict(rank) for _ in range(self.ranks)] + [
            dict(explorer) for _ in range(self.explorers)
        ]

    @property
    def uses_gpus(self) -> bool:
        """Return True if a process has a GPU, or a part of one."""
        return any("GPU" in bundle for bundle in self.bundles())

    def format(self) -> str:
        """Return the needs as text."""
        parts = [
            f"{_format_share(self.rank_cpus, self.rank_gpus)} for each of "
            f"{format_count(self.ranks, 'rank')}"
        ]
        if self.explorers:
            parts.append(
                f"{_format_share(self.explorer_cpus, self.explorer_gpus)} for each of "
                f"{format_count(self.explorers, 'explorer')}"
            )
        return ", ".join(parts)


def format_devices(needs: Needs, nodes: Sequence[float]) -> list[str]:
    """Return lines about the GPUs of a run's processes; none in a cluster without GPUs.

    Args:
        needs: Needs of the run, with GPUs.
        nodes: Number of GPUs of each node.
    """
    total = sum(nodes)
    if not total:
        return []
    lines = [f"{format_count(total, 'GPU')}: {needs.format()}"]
    if total < needs.ranks and not needs.rank_gpus:
        lines.append(
            f"warning: the ranks compute on CPUs, for there are {format_count(total, 'GPU')} and "
            f"{needs.ranks} ranks: set trainer.ranks {total:g} to train on GPUs"
        )
    return lines


def _make_bundle(cpus: float, gpus: float | None) -> Bundle:
    return {"CPU": cpus} | ({"GPU": gpus} if gpus else {})


def _format_share(cpus: float, gpus: float | None) -> str:
    share = format_count(cpus, "CPU")
    if not gpus:
        return share
    return f"{share} and " + ("a GPU" if gpus == 1 else format_count(gpus, "GPU"))


def _fits(nodes: Sequence[float], shares: Sequence[float]) -> bool:
    """Return True if Ray finds a place for these shares of GPUs, in their order.

    As Ray does, each fraction takes the GPU with the least room that is enough (ClusterResource's
    instances), and a whole number takes idle GPUs of one node.
    """
    free = [[1.0] * int(count) for count in nodes]
    for share in shares:
        whole = math.ceil(share)
        if whole > 1:
            idle = [[at for at, room in enumerate(gpus) if room == 1.0] for gpus in free]
            node = next((node for node, ats in enumerate(idle) if len(ats) >= whole), None)
            if node is None:
                return False
            for at in idle[node][:whole]:
                free[node][at] = 0.0
        elif share:
            fitting = [
                (room, node, at)
                for node, gpus in enumerate(free)
                for at, room in enumerate(gpus)
                # Half a unit absorbs what the subtraction of floats leaves: 1 - 0.9 is less than
                # 0.1.
                if room > share - _RAY_UNIT / 2
            ]
            if not fitting:
                return False
            room, node, at = min(fitting)
            free[node][at] = room - share
    return True


def local_gpus() -> int:
    """Return the GPUs of this host that Ray would find, without starting it."""
    # Ray's own variable, which its nodes obey before they look for devices.
    overridden = json.loads(os.environ.get("RAY_OVERRIDE_RESOURCES") or "{}")
    if "GPU" in overridden:
        return int(overridden["GPU"])
    # Private, as Ray's public resources are known only once it runs.
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager: Any = get_accelerator_manager_for_resource("GPU")
    visible = manager.get_current_process_visible_accelerator_ids()
    count: int = manager.get_current_node_num_accelerators()
    # None without CUDA_VISIBLE_DEVICES, which may also hide all of them.
    return count if visible is None else min(count, len(visible))


def with_rank_count(config: TrainConfig, gpus: int) -> TrainConfig:
    """Return the configuration with the number of ranks, where the user leaves it open.

    It is the highest number, up to the GPUs, that the other settings allow. Megatron's default
    shares each layer between all ranks, and a model may have few heads: it gets no more ranks than
    without GPUs.

    Args:
        config: The configuration.
        gpus: GPUs of this host; 0 for a run in a cluster.
    """
    trainer = config.trainer
    if trainer.ranks is not None:
        return config
    if trainer.on_megatron and trainer.tensor_parallel is None:
        gpus = min(gpus, DEFAULT_RANKS)
    # One rank is tried last, for settings that allow no more whatever the host has.
    for ranks in (*range(0 if trainer.gpus == 0 else gpus, 0, -1), DEFAULT_RANKS, 1):
        chosen = config.replaced("trainer", ranks=ranks)
        if not any(find_contradictions(chosen, str)):
            return chosen
    return config.replaced("trainer", ranks=DEFAULT_RANKS)


def with_reserved_cpus(config: TrainConfig) -> TrainConfig:
    """Return the configuration for a shared cluster, where no process uses more than its CPUs."""
    needs = Needs.for_run(config, explorers=config.explorers)
    config = config.replaced("trainer", cpus=needs.rank_cpus)
    return config.replaced("explorer", cpus=needs.explorer_cpus)


def node_gpus() -> list[float]:
    """Return the number of GPUs of each node of the cluster that this process is in."""
    import ray

    nodes: list[Any] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"].get("GPU", 0.0) for node in nodes if node["Alive"]]


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
        needs = Needs.for_run(config, explorers=0).with_gpus(node_gpus())
        return {"num_cpus": needs.rank_cpus, "num_gpus": needs.rank_gpus}, bool(needs.rank_gpus)
    bundle = group.bundle_specs[rank]
    count = bundle.get("GPU", 0)
    return placement_options(group, rank, num_cpus=bundle["CPU"], num_gpus=count), count > 0


def threads(cpus: float | None, sharing: int) -> int:
    """Return the threads of a process: its CPUs, or its share of the host's if none are given."""
    # Rounded down, as a thread without a core slows the others; never 0, which torch refuses.
    return max(1, math.floor(cpus) if cpus is not None else (os.cpu_count() or 1) // sharing)
