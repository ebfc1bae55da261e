"""Ranks of a trainer, and explorers, as processes that tests can kill."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tests.support.rank_processes import Rank, RankProcesses
from tests.support.waits import wait_until
from trinity_events import Synchronizer

TIMEOUT = 10.0
"""Of collective groups: what works has to be done by then, on a busy machine too."""
TRAINERS_TIMEOUT = 50.0
"""Of the trainer's own group, whose ranks wait while rank 0 waits for explorers."""
TRAINERS = 2


class Places(NamedTuple):
    """What every process is told."""

    run_id: str
    epoch: int
    redis_url: str
    weights_url: str
    folder: Path
    device: str = "cpu"

    @property
    def timeout(self) -> float:
        """Of collective groups: the first one on a GPU takes seconds to be made."""
        return TIMEOUT if self.device == "cpu" else 5 * TIMEOUT

    @property
    def backend(self) -> str:
        return "gloo" if self.device == "cpu" else "nccl"


class Tiny(nn.Module):
    """Blocks within a root, a buffer-less model of two dtypes with a tied pair."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Engine:
    """What the helpers rely on; it stops at a tensor when it is told to."""

    def __init__(self, kind: str, seed: int, device: str) -> None:
        self.module = sharded(Tiny(seed).to(device), kind, device)
        self.stops_at: tuple[int, Path] | None = None

    def get_per_tensor_param(self):
        for index, (name, parameter) in enumerate(self.module.named_parameters()):
            if self.stops_at is not None and index == self.stops_at[0]:
                wait_here(self.stops_at[1])
            yield name, parameter.full_tensor()


def sharded(model: nn.Module, kind: str, device: str) -> nn.Module:
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    from torch.distributed.fsdp import FullyShardedDataParallel

    own = torch.device(device, 0) if device == "cuda" else torch.device(device)
    original = kind == "fsdp1-original"
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(
            block, device_id=own, use_orig_params=original
        )
    return FullyShardedDataParallel(model, device_id=own, use_orig_params=original)


def wait_here(file: Path) -> None:
    """Say that we are here, and stay until the test lets us go."""
    file.touch()
    wait_until(file.with_suffix(".go").exists)


def begin_training(rank: Rank, places: Places, kind: str, meeting: int) -> None:
    dist.init_process_group(
        places.backend,
        init_method=Path(places.folder, f"ranks-{meeting}").as_uri(),
        rank=rank.number,
        world_size=TRAINERS,
        timeout=timedelta(seconds=places.timeout * TRAINERS_TIMEOUT / TIMEOUT),
    )
    rank.exits.callback(dist.destroy_process_group)
    rank.objects.engine = Engine(kind, seed=7, device=places.device)
    rank.objects.synchronizer = synchronizer(rank, places, "actor", rank.number, places.epoch)


def set_up(rank: Rank, explorers: int, patience: float = 10.0) -> tuple[str, ...]:
    return rank.objects.synchronizer.setup_weight_sync_group(explorers, patience)


def send(rank: Rank, step: int, stop: tuple[int, Path] | None = None) -> None:
    from trinity_workers.helpers import fsdp_sync_weight_nccl

    synchronizer = rank.objects.synchronizer
    rank.objects.engine.stops_at = stop if rank.number == 0 else None
    group = synchronizer.model_update_group(step) if rank.number == 0 else None
    try:
        fsdp_sync_weight_nccl(rank.objects.engine, group)
    finally:
        synchronizer.flush()


def explore(rank: Rank, places: Places) -> None:
    rank.objects.model = Tiny(seed=rank.number).to(places.device)
    made = synchronizer(rank, places, "explorer", rank.number - TRAINERS, 0)
    made.join_weight_sync_group()
    rank.objects.synchronizer = made


def apply(rank: Rank, ready) -> dict[str, torch.Tensor]:
    try:
        rank.objects.synchronizer.apply(rank.objects.model, ready)
    finally:
        rank.objects.synchronizer.flush()
    return weights(rank)


def weights(rank: Rank) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in rank.objects.model.state_dict().items()}


def leave(rank: Rank) -> None:
    rank.exits.close()
    rank.objects = SimpleNamespace()


def synchronizer(rank: Rank, places: Places, role: str, number: int, epoch: int) -> Synchronizer:
    made = Synchronizer(
        places.run_id,
        epoch,
        redis_url=places.redis_url,
        weights_url=places.weights_url,
        role=role,
        rank=number,
        transport="collective",
        chunk_bytes=64,
        group_timeout=places.timeout,
    )
    rank.exits.callback(made.close)
    return made


def kill(processes: RankProcesses, rank: int) -> None:
    os.kill(processes.pid(rank), signal.SIGKILL)
