"""FSDP helpers: save a sharded state dict in the background, publish and broadcast weights.

The engine has ``module`` and ``get_per_tensor_param()``: this project's FSDPEngine, or another with
the same interface. Every function is collective: all ranks call it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from logging import Logger
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trinity_events.coordinator import PlannedSave
from trinity_events.errors import TrinityError
from trinity_events.weights import ShardOffset, Synchronizer
from trinity_events.weights.compatibility import plain_name
from trinity_schemas import Probes

from ..engines.base import LocalShard, TrainEngine, per_tensor_params, resident, trained_module
from ..engines.buffers import all_buffer_names, saved_buffers
from ..engines.shard_slices import find_held_slice
from ..engines.sharded import description_paths, saved_part, shard_name, write_description
from ..engines.state_files import copied, count_bytes, write_state
from ..runtime.collectives import rank_and_world
from .broadcast import UpdateGroup, broadcast_stream
from .full_tensors import full_tensors
from .publishing import FULL, ModelWeights, PublishStrategy, buffer_names

if TYPE_CHECKING:
    from trinity_events import CheckpointCoordinator

SAVE_NAME = "model_state_dict"


class ShardsRefused(TrinityError):
    """The ranks' shards of the model cannot be published in their layout.

    Attributes:
        fault: ``FSDP1`` and ``adapters`` for models without such shards, ``placement`` and
            ``shape`` for a tensor of another layout.
        tensor: Name of the tensor.
        placement: Its placement.
        shape: Shape of the rank's shard.
        expected: Shape that was expected.
    """

    fault: Literal["FSDP1", "adapters", "placement", "shape"]
    tensor: str = ""
    placement: str = ""
    shape: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()
    _instead: ClassVar = "upload with strategy=PublishFull()"
    texts: ClassVar = {
        "FSDP1": "FSDP1 keeps flat parameters, which are no shards of tensors: " + _instead,
        "adapters": "the model has adapters (PEFT), which an engine merges, or leaves out, as it "
        "gathers: " + _instead,
        "placement": "{tensor} is laid out as {placement}: " + _instead,
        "shape": "{tensor} has a shard of {shape}, where {expected} was expected: " + _instead,
    }


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
        PlannedSave(save=save, nbytes=count_bytes(state)),
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
    probes: Probes | None = None,
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
        probes: Probes of the weights as they are published, which rank 0 seals with the version.

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
        probes=probes,
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


def fsdp_shards(
    module: Any, dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
) -> Iterator[LocalShard]:
    """Yield the shards that this rank publishes of an FSDP2 model.

    What several ranks hold alike is left to one of them: in a mesh the first along each replicated
    dimension; of what is not in a mesh at all, the ranks take turns.

    Args:
        module: The model.
        dtypes: Data types to publish parameters in, by name; by default their own.

    Raises:
        ShardsRefused: for FSDP1, whose flat parameters are no shards of tensors, for models with
            adapters, whose parameters are not the model's, and for layouts other than even chunks
            and replicas.
    """
    if any(
        type(submodule).__name__ == "FullyShardedDataParallel" for submodule in module.modules()
    ):
        raise ShardsRefused("FSDP1")
    if hasattr(module, "peft_config"):
        raise ShardsRefused("adapters")
    rank, ranks = rank_and_world()
    named = chain(module.named_parameters(), saved_buffers(module))
    for index, (name, tensor) in enumerate(named):
        value = tensor.detach()
        if isinstance(value, DTensor):
            place = _place(name, value)
            local = value.to_local()
        else:
            place = (
                ShardOffset((0,) * value.dim(), tuple(value.shape))
                if index % ranks == rank
                else None
            )
            local = value
        if place is not None:
            local = local.to(dtypes.get(name, local.dtype))
            yield LocalShard(plain_name(name), local, place.global_shape, place.begins)


def _place(name: str, value: DTensor) -> ShardOffset | None:
    """Return the offset of the rank's shard; None if it is empty or another rank publishes it."""
    coordinate: Sequence[int] | None = value.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    part = find_held_slice(value, coordinate)
    if part is None:
        raise ShardsRefused("placement", name, str(value.placements))
    offsets, shape = part.place
    if tuple(value.to_local().shape) != shape:
        raise ShardsRefused("shape", name, shape=tuple(value.to_local().shape), expected=shape)
    # One rank publishes a tensor without elements, so that readers know of it.
    empty = 0 in shape and (0 not in value.shape or any(coordinate))
    return ShardOffset(offsets, tuple(value.shape)) if part.is_first and not empty else None
