"""FSDP helpers: save a sharded state dict in the background, publish and broadcast weights.

The engine has ``module`` and ``get_per_tensor_param()``: this project's FSDPEngine, or another with
the same interface. Every function is collective: all ranks call it.
"""

from __future__ import annotations

from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from trinity_events.weights import Synchronizer

from ..engines.base import TrainEngine, per_tensor_params, resident, trained_module
from ..engines.buffers import all_buffer_names
from ..engines.sharded import description_paths, saved_part, shard_name, write_description
from ..engines.state_files import copied, write_state
from .broadcast import UpdateGroup, broadcast_stream
from .full_tensors import full_tensors
from .publish_full import FULL
from .publish_strategy import PublishStrategy
from .publishing import ModelWeights, buffer_names
from .shards import fsdp_shards

if TYPE_CHECKING:
    from trinity_events import CheckpointCoordinator

SAVE_NAME = "model_state_dict"


def fsdp_save_state_dict(
    engine: Any,
    local_path: str,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: Logger,
    *,
    name: str = SAVE_NAME,
    is_state_dict: bool = True,
) -> None:
    """Save the sharded model state dict, or that of its adapters, in the background.

    The calling thread copies the shard to the CPU; the coordinator writes it while training
    continues. As part of its save, rank 0 also writes the files that a merger of the shards reads:
    ``huggingface`` (configuration, generation defaults, tokenizer) and ``fsdp_config.json``. Every
    rank's save is a slot of its own and carries the number of ranks. So the step is ready when all
    ranks have written, whatever number was registered. A save with parameters that are not finite
    fails, and writes nothing.

    Args:
        engine: The engine; ``engine.module`` is the sharded model.
        local_path: Folder to save to.
        global_step: The training step.
        coordinator: Runs the save and publishes its events.
        logger: Logs the file of the save.
        name: Name of the save within a rank.
        is_state_dict: False for a model that is a part of checkpoints alone, such as a critic.
    """
    folder = Path(local_path)
    path = folder / shard_name(saved_part(engine))
    module = trained_module(engine)
    buffers = all_buffer_names(module)
    with resident(engine):
        state = copied(module.state_dict())
    first = dist.get_rank() == 0

    def save() -> None:
        write_state(path, state, exempt=buffers)
        if first:
            write_description(folder, engine)

    logger.info("step %d: saves %s in the background", global_step, path)
    coordinator.save_async(
        name,
        save,
        global_step,
        is_state_dict=is_state_dict,
        path=path,
        ranks=dist.get_world_size(),
        also=description_paths(folder) if first else (),
    )


def fsdp_upload_state_dict(
    engine: TrainEngine,
    synchronizer: Synchronizer,
    global_step: int,
    logger: Logger,
    *,
    strategy: PublishStrategy = FULL,
) -> None:
    """Publish the weights as the version of ``global_step``.

    By default rank 0 streams full tensors one by one: no rank ever holds the whole model. With
    ``PublishShards`` every rank publishes its own shards without a gather, and readers assemble
    them. ``PublishSnapshot`` publishes a copy of the shards, and returns as soon as the copy is
    made. If a rank fails, all ranks finish the gathers and then raise; the version is never
    announced.

    Args:
        engine: The engine; its ``get_per_tensor_param()`` gathers on all ranks. For shards, its
            ``module`` must be of FSDP2.
        synchronizer: Publishes the part and its events: on rank 0, or for shards on every rank.
        global_step: Training step of the version.
        logger: Logs the published bytes.
        strategy: Strategy of all ranks; the same object for every version.

    Raises:
        PeerFailed: on the ranks that did not fail themselves.
        ShardsRefused: if the module's layout cannot be published as shards.
        NonFiniteWeights: on the ranks that publish parameters with values that are not finite.
    """
    dtypes = getattr(engine, "published_dtypes", {})  # veRL's engines have none
    weights = ModelWeights(
        full=lambda: per_tensor_params(engine),
        shards=lambda: fsdp_shards(trained_module(engine), dtypes),
        buffers=buffer_names(trained_module(engine)),
    )
    with resident(engine):
        strategy.publish(weights, synchronizer, global_step, logger)


def fsdp_sync_weight_nccl(engine: TrainEngine, model_update_group: UpdateGroup | None) -> None:
    """Broadcast the full weights, in buckets, to the explorers of a collective group.

    Every rank of the trainer takes part in the gathers. Rank 0, which is also rank 0 of the group,
    broadcasts. It works for FSDP1 and FSDP2, on NCCL or Gloo.

    Args:
        engine: The engine.
        model_update_group: On rank 0, the result of ``Synchronizer.model_update_group`` for the
            step, or a plain process group. The other ranks of a plain group receive the tensors one
            by one in the order of ``get_per_tensor_param()``. None on the trainer's other ranks.

    Raises:
        PeerFailed: on the ranks that did not fail themselves.
        GroupBroken: on rank 0, if an explorer died or was too slow.
        CollectiveBroken: if a rank of the trainer died or was too slow.
    """
    with resident(engine):
        broadcast_stream(
            full_tensors(engine), model_update_group, buffers=buffer_names(trained_module(engine))
        )
