"""FSDP: save a sharded state dict in the background, upload the weights, broadcast them.

The engine exposes ``module`` and ``get_per_tensor_param()``: this project's FSDPEngine, or another
of the same interface. Every function is collective: all ranks call it.
"""

from __future__ import annotations

from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from trinity_events.weights import Synchronizer

from ..engines.base import TrainEngine, per_tensor_params
from ..engines.fsdp import shard_name, write_description
from ..engines.state_files import copied, write_state
from .broadcast import UpdateGroup, broadcast_stream
from .full_tensors import full_tensors
from .shards import fsdp_shards, publish_shards
from .snapshot import SnapshotUploads
from .upload import publish_stream

if TYPE_CHECKING:
    from trinity_events import CheckpointCoordinator

SAVE_NAME = "model_state_dict"


def fsdp_save_state_dict(
    engine: Any,
    local_path: str,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: Logger,
) -> None:
    """Save the sharded model state dict, in the background.

    The shard is copied to the CPU on the calling thread; writing it is left to the coordinator,
    so that training goes on. As part of its save, rank 0 also writes what a merger of the shards
    reads: ``huggingface`` (configuration, generation defaults, tokenizer) and ``fsdp_config.json``.
    Every rank's save is a slot of its own and says of how many it is one, so that the step is ready
    when all are written, however many were registered.

    Args:
        engine: The engine; ``engine.module`` is the sharded model.
        local_path: Folder to save to.
        global_step: The training step.
        coordinator: Runs the save and tells the log of it.
        logger: Says where it saves to.
    """
    folder = Path(local_path)
    path = folder / shard_name("model")
    state = copied(engine.module.state_dict())
    first = dist.get_rank() == 0

    def save() -> None:
        write_state(path, state)
        if first:
            write_description(folder, engine.module, _tokenizer(engine))

    logger.info("step %d: saves %s in the background", global_step, path)
    coordinator.save_async(
        SAVE_NAME,
        save,
        global_step,
        is_state_dict=True,
        path=path,
        ranks=dist.get_world_size(),
    )


def fsdp_upload_state_dict(
    engine: TrainEngine,
    synchronizer: Synchronizer,
    global_step: int,
    logger: Logger,
    *,
    sharded: bool = False,
    snapshots: SnapshotUploads | None = None,
) -> None:
    """Publish the weights as the version of ``global_step``.

    Full tensors, streamed from rank 0 one by one: no rank ever holds the whole model. Or, sharded,
    every rank its own part of each: nothing is gathered, and those who pull put them together.
    When a rank fails, all finish the gathers, then all raise; the version is never seen.

    Args:
        engine: The engine; its ``get_per_tensor_param()`` gathers on all ranks. Sharded, its
            ``module`` is of FSDP2.
        synchronizer: Where to; on rank 0 it publishes the events too, sharded on every rank.
        global_step: The training step, which names the version.
        logger: Says what was published.
        sharded: Whether every rank publishes what it holds.
        snapshots: Publishes it from a copy, sharded, and returns as soon as that is made.

    Raises:
        PeerFailed: on the ranks that did not fail themselves.
        ShardsRefused: when the module's layout is none that can be published so.
    """
    if snapshots is not None:
        snapshots.begin(fsdp_shards(engine.module), global_step, logger)
        return
    if sharded:
        publish_shards(fsdp_shards(engine.module), synchronizer, global_step, logger)
        return
    publish_stream(per_tensor_params(engine), synchronizer, global_step, logger)


def fsdp_sync_weight_nccl(engine: TrainEngine, model_update_group: UpdateGroup | None) -> None:
    """Broadcast the full weights, in buckets, to the explorers of a collective group.

    Every rank of the trainer advances the gathers; rank 0, which is rank 0 of the group too,
    broadcasts. For FSDP1 and FSDP2, on NCCL or Gloo.

    Args:
        engine: The engine.
        model_update_group: What ``Synchronizer.model_update_group`` gives for the step, or a bare
            process group, whose other ranks receive the tensors one by one in the order of
            ``get_per_tensor_param()``; None on other ranks of the trainer.

    Raises:
        PeerFailed: on the ranks that did not fail themselves.
        GroupBroken: on rank 0, when an explorer died or was too slow.
        CollectiveBroken: when a rank of the trainer died, or was too slow.
    """
    broadcast_stream(full_tensors(engine), model_update_group)


def _tokenizer(engine: Any) -> Any:
    own = getattr(engine, "tokenizer", None)
    if own is not None:
        return own
    # veRL keeps it with the checkpoint manager.
    return getattr(getattr(engine, "checkpoint_manager", None), "processing_class", None)
