"""Megatron helpers: save a distributed state dict, publish the weights, broadcast them.

The engine has ``module``, ``get_per_tensor_param()`` and ``save_checkpoint()``: this project's
MegatronEngine, or veRL's unchanged. Every function is collective: all ranks call it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import xxhash

from trinity_events.coordinator import PlannedSave
from trinity_events.errors import TrinityError
from trinity_events.weights import Synchronizer
from trinity_schemas import Probes

from ..engines.base import LocalShard, TrainEngine, per_tensor_params, resident
from ..runtime.collective_errors import CollectiveBroken, PeerFailed
from ..runtime.collectives import gather_bytes, raise_together, together
from ..storage.durable_files import sync_tree
from .broadcast import UpdateGroup, broadcast_stream
from .publishing import FULL, ModelWeights, PublishStrategy

if TYPE_CHECKING:
    from trinity_events import CheckpointCoordinator

SAVE_NAME = "model_state_dict"
_KEY_BYTES = 8  # length of an XXH3 digest of 64 bits


class NoCheckpointManager(TrinityError):
    """The engine cannot save, since it has no checkpoint manager.

    Attributes:
        engine: Class of the engine.
    """

    engine: str
    text = "{engine} has no checkpoint manager: it was made for the forward pass alone"


def megatron_save_state_dict(
    engine: Any,
    local_path: str,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: Logger,
) -> None:
    """Save the model without optimizer and extra state, for weight sync.

    The save is synchronous, since it has barriers. All ranks write one folder, so it is one save:
    rank 0 publishes its events, and the trainer registers one thread. It is finished when all of it
    is on disk.

    Args:
        engine: The engine; its checkpoint manager's contents are put back even after an error.
        local_path: Folder to save to.
        global_step: The training step.
        coordinator: Publishes the events of the save.
        logger: Logs the folder of the save.

    Raises:
        PeerFailed: on the ranks that did not fail themselves.
        NoCheckpointManager: if the engine was made for the forward pass alone.
    """
    folder = Path(local_path)

    def write() -> None:
        with only(engine, ["model"]):
            engine.save_checkpoint(local_path, global_step=global_step)
        with together():
            if dist.get_rank() == 0:
                sync_tree(folder)  # files that another engine wrote may not be durable yet

    save_as_one(write, folder, global_step, coordinator, logger, name=SAVE_NAME, is_state_dict=True)


def save_as_one(
    write: Callable[[], None] | PlannedSave,
    folder: Path,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: Logger,
    *,
    name: str,
    is_state_dict: bool,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Let all ranks write one folder as one save of rank 0. Collective; raises on all ranks.

    Args:
        write: Writes this rank's part, durably. Collective; raises on all ranks. A PlannedSave has
            the bytes of all ranks.
        folder: Folder that is written.
        global_step: The training step.
        coordinator: Publishes the events of the save.
        logger: Logs the folder of the save.
        name: Name of the save within the worker.
        is_state_dict: True for a state dict for weight sync, False for a part of a checkpoint.
        group: Process group of this function and of ``write``; by default the default group. A
            thread beside training needs a group of its own.

    Raises:
        PeerFailed: on the ranks that did not fail themselves.
        CollectiveBroken: if a rank died or was too slow.
    """
    # They decide after an error whether all ranks have raised it, or have yet to receive it.
    writing = written = False

    def save() -> None:
        nonlocal writing, written
        raise_together(None, group)  # check that rank 0 could publish the start
        writing = True
        try:
            write()
        except RuntimeError as caught:  # raised by the process group; the engine raises none
            raise CollectiveBroken("save", str(caught), global_step) from caught
        written = True

    error: Exception | None = None
    try:
        if dist.get_rank() == 0:
            logger.info("step %d: saves %s to %s", global_step, name, folder)
            nbytes = write.nbytes if isinstance(write, PlannedSave) else None
            planned = PlannedSave(save=save, nbytes=nbytes)
            coordinator.save_sync(planned, global_step, is_state_dict, name=name, path=folder)
        else:
            save()
    except PeerFailed:
        raise
    except CollectiveBroken as broken:
        if dist.get_rank() != 0:
            _publish_failure(broken, global_step, coordinator, name, is_state_dict, logger)
        raise
    except Exception as caught:
        if writing and not written:  # all ranks have raised it already
            raise
        error = caught
    raise_together(error, group)


def megatron_upload_state_dict(
    engine: Any,
    synchronizer: Synchronizer,
    global_step: int,
    logger: Logger,
    *,
    strategy: PublishStrategy = FULL,
    probes: Probes | None = None,
) -> None:
    """Publish the weights as the version of ``global_step``.

    As :func:`fsdp_upload_state_dict`; shards have their tensors' Hugging Face names.

    Raises:
        PeerFailed: on the ranks that did not fail themselves.
        CollectiveBroken: if a rank died or was too slow.
    """
    weights = ModelWeights(
        full=lambda: per_tensor_params(engine),
        shards=lambda: without_replicas(engine.local_shards()),
        probes=probes,
    )
    with resident(engine):
        strategy.publish(weights, synchronizer, global_step, logger)


def megatron_sync_weight_nccl(engine: TrainEngine, model_update_group: UpdateGroup | None) -> None:
    """Broadcast the full weights, in buckets, to the explorers of a collective group.

    Every rank of the trainer takes part in the gathers. Rank 0, which is also rank 0 of the group,
    broadcasts.

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
        broadcast_stream(per_tensor_params(engine), model_update_group)


@contextmanager
def only(engine: Any, contents: Sequence[str]) -> Iterator[None]:
    """Restrict the engine's saves in the block to these contents, without async saving."""
    # veRL's Megatron engine uses this attribute name.
    manager = getattr(engine, "checkpoint_manager", None) or getattr(
        engine, "checkpoint_mananager", None
    )
    if manager is None:
        raise NoCheckpointManager(type(engine).__name__)
    contents_before = manager.checkpoint_save_contents
    config: Any = getattr(manager, "checkpoint_config", None)
    try:
        manager.checkpoint_save_contents = list(contents)
        # veRL's async save returns before the files are on disk
        if getattr(config, "async_save", False):
            manager.checkpoint_config = dataclasses.replace(config, async_save=False)
        yield
    finally:
        manager.checkpoint_save_contents = contents_before
        if config is not None:
            manager.checkpoint_config = config


def _publish_failure(
    error: CollectiveBroken,
    step: int,
    coordinator: CheckpointCoordinator,
    name: str,
    is_state_dict: bool,
    logger: Logger,
) -> None:
    """Publish the failure of a broken save on every rank: rank 0 may be the dead one."""

    def fail() -> None:
        raise error

    try:
        # A name of its own: several survivors publish, and each is another slot.
        coordinator.save_sync(fail, step, is_state_dict, name=f"{name}_{dist.get_rank()}")
    except CollectiveBroken:
        pass
    except Exception:
        logger.exception("step %d: the failure of the save could not be published", step)


def without_replicas(shards: Iterable[LocalShard]) -> list[LocalShard]:
    """Return the shards that this rank publishes, where ranks hold some alike. Collective.

    Each goes to one of the ranks that have it, by a digest that deals them out evenly.
    """
    # The shards may be refused on one rank alone, before the collective below.
    with together():
        mine = list(shards)
    keys = [_key(shard) for shard in mine]
    owned_by = owners(gather_bytes(b"".join(keys)))
    return [
        shard for shard, key in zip(mine, keys, strict=True) if owned_by[key] == dist.get_rank()
    ]


def owners(everyone: Sequence[bytes]) -> dict[bytes, int]:
    """Return the rank that publishes each shard, from all ranks' keys, in rank order."""
    holders: dict[bytes, list[int]] = {}
    for rank, keys in enumerate(everyone):
        for begin in range(0, len(keys), _KEY_BYTES):
            holders.setdefault(keys[begin : begin + _KEY_BYTES], []).append(rank)
    return {key: ranks[int.from_bytes(key, "big") % len(ranks)] for key, ranks in holders.items()}


def _key(shard: LocalShard) -> bytes:
    description = repr((shard.name, shard.global_shape, shard.offsets, tuple(shard.tensor.shape)))
    return xxhash.xxh3_64_digest(description.encode())
