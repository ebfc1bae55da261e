"""Megatron: save a distributed state dict, upload the weights to the Synchronizer, broadcast them.

The engine exposes ``module``, ``get_per_tensor_param()`` and ``save_checkpoint()``: this project's
MegatronEngine, or veRL's as it is. Every function is collective: all ranks call it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from trinity_events.errors import TrinityError
from trinity_events.weights import Synchronizer

from ..collectives import CollectiveBroken, PeerFailed, raise_together, together
from ..engines.base import TrainEngine, per_tensor_params
from ..engines.state_files import sync_tree
from .broadcast import UpdateGroup, broadcast_stream
from .shards import publish_shards, without_replicas
from .snapshot import SnapshotUploads
from .upload import publish_stream

if TYPE_CHECKING:
    from trinity_events import CheckpointCoordinator

SAVE_NAME = "model_state_dict"


class NoCheckpointManager(TrinityError):
    """The engine cannot save: it has nothing that says what a checkpoint consists of."""


def megatron_save_state_dict(
    engine: Any,
    local_path: str,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: Logger,
) -> None:
    """Save the model alone, without optimizer and extra state, for weight sync.

    Synchronous, for the save has barriers. All ranks write one folder, so it is one save: rank 0
    tells the log of it, and the trainer registers one. It is finished when all of it is on disk.

    Args:
        engine: The engine; its checkpoint manager's contents are put back even after an error.
        local_path: Folder to save to.
        global_step: The training step.
        coordinator: Tells the log of the save.
        logger: Says where it saves to.

    Raises:
        PeerFailed: on the ranks that did not fail themselves.
        NoCheckpointManager: when the engine was made for the forward pass alone.
    """
    folder = Path(local_path)

    def write() -> None:
        with _only(engine, ["model"]):
            engine.save_checkpoint(local_path, global_step=global_step)
        with together():
            if dist.get_rank() == 0:
                sync_tree(folder)  # another engine's files may not be on disk yet

    save_as_one(write, folder, global_step, coordinator, logger, name=SAVE_NAME, is_state_dict=True)


def save_as_one(
    write: Callable[[], None],
    folder: Path,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: Logger,
    *,
    name: str,
    is_state_dict: bool,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Let all ranks write one folder, as one save of rank 0's. Collective; raises on all.

    Args:
        write: Writes this rank's part. Collective; on disk on return, and raises on all ranks.
        folder: What is written.
        global_step: The training step.
        coordinator: Tells the log of the save.
        logger: Says where it saves to.
        name: Of the save within the worker.
        is_state_dict: Whether it is a state dict for weight sync, not part of a checkpoint.
        group: The ranks' group that this and the writing talk over; the default one when left out.
            In another thread than training it must be one of its own.

    Raises:
        PeerFailed: on the ranks that did not fail themselves.
        CollectiveBroken: when a rank died, or was too slow.
    """
    writing = written = False

    def save() -> None:
        nonlocal writing, written
        raise_together(None, group)  # whether rank 0 could tell the log that it begins
        writing = True
        try:
            write()
        except RuntimeError as caught:  # the process group's: the engine's own are none
            raise CollectiveBroken(
                f"step {global_step} could not be saved, because a rank died or was too slow: "
                f"{caught}"
            ) from caught
        written = True

    error: Exception | None = None
    try:
        if dist.get_rank() == 0:
            logger.info("step %d: saves %s to %s", global_step, name, folder)
            coordinator.save_sync(save, global_step, is_state_dict, name=name, path=folder)
        else:
            save()
    except PeerFailed:
        raise
    except CollectiveBroken as broken:
        if dist.get_rank() != 0:
            _tell(broken, global_step, coordinator, name, is_state_dict, logger)
        raise
    except Exception as caught:
        if writing and not written:  # the ranks have agreed on it
            raise
        error = caught
    raise_together(error, group)


def megatron_upload_state_dict(
    engine: Any,
    synchronizer: Synchronizer,
    global_step: int,
    logger: Logger,
    *,
    sharded: bool = False,
    snapshots: SnapshotUploads | None = None,
) -> None:
    """Publish the weights as the version of ``global_step``.

    Full tensors, streamed from rank 0 one by one: no rank ever holds the whole model. Or, sharded,
    every rank its own part of each, under its Hugging Face name: nothing is gathered.
    When a rank fails, all finish the gathers, then all raise; the version is never seen.

    Args:
        engine: The engine; its ``get_per_tensor_param()`` gathers on all ranks. Sharded, its
            ``local_shards()`` says what the rank holds, as this project's engine does.
        synchronizer: Where to; on rank 0 it publishes the events too, sharded on every rank.
        global_step: The training step, which names the version.
        logger: Says what was published.
        sharded: Whether every rank publishes what it holds.
        snapshots: Publishes it from a copy, sharded, and returns as soon as that is made.

    Raises:
        PeerFailed: on the ranks that did not fail themselves.
        CollectiveBroken: when a rank died, or was too slow.
    """
    if snapshots is not None:
        snapshots.begin(without_replicas(engine.local_shards()), global_step, logger)
        return
    if sharded:
        shards = without_replicas(engine.local_shards())
        publish_shards(shards, synchronizer, global_step, logger)
        return
    publish_stream(per_tensor_params(engine), synchronizer, global_step, logger)


def megatron_sync_weight_nccl(engine: TrainEngine, model_update_group: UpdateGroup | None) -> None:
    """Broadcast the full weights, in buckets, to the explorers of a collective group.

    Every rank of the trainer advances the gathers; rank 0, which is rank 0 of the group too,
    broadcasts.

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
    broadcast_stream(per_tensor_params(engine), model_update_group)


@contextmanager
def _only(engine: Any, contents: Sequence[str]) -> Iterator[None]:
    """Let the engine save these contents alone, and at once, in the block."""
    # veRL's Megatron engine spells its manager so.
    manager = getattr(engine, "checkpoint_manager", None) or getattr(
        engine, "checkpoint_mananager", None
    )
    if manager is None:
        raise NoCheckpointManager(
            "the engine has no checkpoint manager: it was made for the forward pass alone"
        )
    contents_before = manager.checkpoint_save_contents
    config: Any = getattr(manager, "checkpoint_config", None)
    try:
        manager.checkpoint_save_contents = list(contents)
        if getattr(config, "async_save", False):  # veRL's would return before anything is on disk
            manager.checkpoint_config = dataclasses.replace(config, async_save=False)
        yield
    finally:
        manager.checkpoint_save_contents = contents_before
        if config is not None:
            manager.checkpoint_config = config


def _tell(
    error: CollectiveBroken,
    step: int,
    coordinator: CheckpointCoordinator,
    name: str,
    is_state_dict: bool,
    logger: Logger,
) -> None:
    """Tell the log of a save that broke: rank 0, whose it is, may be the one that died."""

    def fail() -> None:
        raise error

    try:
        coordinator.save_sync(fail, step, is_state_dict, name=f"{name}_{dist.get_rank()}")
    except CollectiveBroken:
        pass
    except Exception:
        logger.exception("step %d: the failure of the save could not be published", step)
