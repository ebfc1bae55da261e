"""What the tests let ranks do with veRL's own FSDP engine."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.support.failing_synchronizers import FailingSynchronizer, FailsOnRank1
from tests.support.rank_processes import Rank
from tests.support.tensors import identical
from trinity_events import CheckpointCoordinator, Synchronizer
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_events.server import open_client
from trinity_workers.engines.state_files import read_state
from trinity_workers.helpers import (
    PublishFull,
    PublishShards,
    fsdp_save_state_dict,
    fsdp_sync_weight_nccl,
    fsdp_upload_state_dict,
    strategy_for,
)

logger = logging.getLogger(__name__)


class Where(NamedTuple):
    """What every rank is told."""

    run_id: str
    epoch: int
    redis_url: str
    weights_url: str
    model_folder: Path
    run_folder: Path


def import_verl(rank: Rank) -> str:
    """Pay for the imports; returns the version."""
    import verl
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    assert FSDPEngineWithLMHead.__module__.startswith("verl.")
    return verl.__version__


def new_engine(model_folder: Path, **model: Any) -> Any:
    """veRL's engine for a language model, as its worker makes it, but for what a CPU lacks."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    made = FSDPEngineWithLMHead(
        HFModelConfig(
            path=str(model_folder),
            use_remove_padding=False,
            override_config={"attn_implementation": "sdpa"},
            **model,
        ),
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False),
        FSDPOptimizerConfig(lr=1e-2, total_training_steps=10),
        CheckpointConfig(),
    )
    made.initialize()
    return made


def begin(rank: Rank, where: Where, **model: Any) -> None:
    """Make the rank's engine."""
    rank.objects.where = where
    rank.objects.engine = new_engine(where.model_folder, **model)


def full_weights(rank: Rank) -> dict[str, torch.Tensor]:
    """What the engine itself gives."""
    return {
        name: tensor.detach().clone()
        for name, tensor in rank.objects.engine.get_per_tensor_param()[0]
    }


def full_parameters(rank: Rank) -> dict[str, torch.Tensor]:
    """The parameters, gathered, as they are trained."""
    return {
        name: parameter.detach().full_tensor().clone()
        for name, parameter in rank.objects.engine.module.named_parameters()
    }


def local_shards(rank: Rank) -> dict[str, torch.Tensor]:
    """What this rank has of the state dict."""
    state = rank.objects.engine.module.state_dict()
    return {name: shard.to_local().clone() for name, shard in state.items()}


def take_step(rank: Rank, seed: int) -> float:
    """An optimizer step; returns the gradient norm."""
    return optimizer_step(rank.objects.engine, rank.number, seed)


def optimizer_step(engine: Any, rank: int, seed: int) -> float:
    """A step of veRL's own optimizer, on tokens of the rank's own; returns the gradient norm."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    tokens = torch.randint(3, 90, (4, 16), generator=generator)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.module(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        norm = engine.optimizer_step()
        engine.lr_scheduler_step()
    return float(norm)


# --- our helpers on it ------------------------------------------------------------------------


def synchronizer(
    rank: Rank, kind: type[Synchronizer] = Synchronizer, **options: Any
) -> Synchronizer:
    where = rank.objects.where
    made = kind(
        where.run_id,
        where.epoch,
        redis_url=where.redis_url,
        weights_url=where.weights_url,
        role="actor",
        rank=rank.number,
        **options,
    )
    rank.exits.callback(made.close)
    return made


def upload(rank: Rank, step: int, how: str) -> None:
    """Publish the weights: full, as shards, or as a snapshot after which training goes on."""
    engine, to = rank.objects.engine, synchronizer(rank)
    strategy = strategy_for(how, 30)
    fsdp_upload_state_dict(engine, to, step, logger, strategy=strategy)
    if how == "snapshot":
        take_step(rank, 9)
    strategy.close()
    to.flush()


def publish_adapter(rank: Rank, step: int) -> dict[str, torch.Tensor]:
    """Publish what the engine gives of its adapter alone, as a subset; returns that."""
    gathered = dict(rank.objects.engine.get_per_tensor_param(base_sync_done=True)[0])
    if rank.number == 0:
        to = synchronizer(rank)
        to.open_version(step)
        to.publish(gathered.items(), step, subset=True)
        to.flush()
    return gathered


def upload_that_fails(rank: Rank, step: int, sharded: bool) -> None:
    to = synchronizer(rank, FailsOnRank1 if sharded else FailingSynchronizer)
    try:
        strategy = PublishShards() if sharded else PublishFull()
        fsdp_upload_state_dict(rank.objects.engine, to, step, logger, strategy=strategy)
    finally:
        to.flush()


class HeldPublisher(Publisher):
    """Publishes nothing before it is let go: a background save then has not begun to write."""

    gate: threading.Event

    def publish(self, event: Any) -> None:
        assert self.gate.wait(30)
        super().publish(event)


def save_then_train(rank: Rank, folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Save in the background, train on before it is written; returns the shards at the call."""
    where = rank.objects.where
    log = SyncEventLog(open_client(where.redis_url), where.run_id)
    rank.exits.callback(log.close)
    publisher = HeldPublisher(log, where.epoch, new_producer("actor", rank.number))
    publisher.gate = threading.Event()
    coordinator = CheckpointCoordinator(publisher, where.run_folder)
    expected = local_shards(rank)
    fsdp_save_state_dict(rank.objects.engine, str(folder), step, coordinator, logger)
    take_step(rank, 8)
    publisher.gate.set()
    coordinator.wait_all()
    publisher.close()
    return expected


def save_and_load(rank: Rank, folder: Path) -> tuple[bool, bool]:
    """veRL's own save and load around a step: whether the step changed anything, and stayed."""
    engine = rank.objects.engine
    before = local_shards(rank)
    engine.save_checkpoint(str(folder), global_step=1)
    take_step(rank, 7)
    trained = local_shards(rank)
    engine.load_checkpoint(str(folder), del_local_after_load=False)
    after = local_shards(rank)
    changed = any(not identical(trained[name], before[name]) for name in before)
    return changed, all(identical(after[name], before[name]) for name in before)


def load_model_of(rank: Rank, folder: Path) -> tuple[bool, bool]:
    """Let veRL load the model alone from what our helper wrote; whether it differed, and fits."""
    engine = rank.objects.engine
    before = local_shards(rank)
    manager = engine.checkpoint_manager
    manager.checkpoint_load_contents = ["model"]
    engine.load_checkpoint(str(folder), del_local_after_load=False)
    written = read_state(folder / f"model_world_size_2_rank_{rank.number}.pt")
    after = local_shards(rank)
    differed = any(not identical(after[name], before[name]) for name in before)
    return differed, all(identical(after[name], written[name].to_local()) for name in after)


def broadcast(rank: Rank, step: int) -> None:
    """Broadcast the weights to an explorer that has joined."""
    to, group = None, None
    if rank.number == 0:
        to = synchronizer(rank, transport="collective", group_timeout=10.0)
        to.setup_weight_sync_group(explorers=1, timeout=20)
        group = to.model_update_group(step)
    fsdp_sync_weight_nccl(rank.objects.engine, group)
    if to is not None:
        to.flush()
