"""megatron-core's distributed checkpoints: any layout reads what any other wrote.

They are written by torch's own writer in threads, not by megatron-core's, which forks the process
and so wants a main script that can be imported again. The format on disk is the same.

Loading unpickles: megatron-core keeps plain values in ``common.pt`` and an index in ``.metadata``
as pickles. Load checkpoints of people that you would run code of, and no others.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint

from trinity_events.errors import TrinityError

from ...collectives import together
from ..files import make_folder, sync_tree
from .cpu import adapted


class CheckpointRefused(TrinityError):
    """The checkpoint cannot be written or read as it was asked for."""


class PendingSave:
    """A checkpoint that is being written in the background."""

    def __init__(self, folder: Path, wait: Callable[[], None]) -> None:
        self.folder = folder
        self._wait = wait

    def wait(self) -> None:
        """Return once everything is on disk. Collective; raises on all ranks what failed on one."""
        self._wait()


def save(state: dict[str, Any], folder: Path) -> None:
    """Write a sharded state dict into a new folder; on disk on return. Collective."""
    begin_save(state, folder, None).wait()


def begin_save(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> PendingSave:
    """Copy a sharded state dict and write it into a new folder. Collective.

    Args:
        state: From ``sharded_state_dict()``.
        folder: Where to; what is there is replaced.
        group: The ranks on Gloo, for the collectives of a write that goes on in the background
            while others go on in this thread; None writes before it returns.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    with together():
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            make_folder(folder)
    strategy = _strategy(group)
    with adapted():
        # Rank 0 checks that the folder is empty, and writes the plain values.
        dist_checkpointing.save(state, str(folder), sharded_strategy=strategy)

    def wait() -> None:
        with together():
            strategy.finish()
        with together():
            if dist.get_rank() == 0:
                save_config(CheckpointingConfig("torch_dist", 1), str(folder))
                sync_tree(folder)

    return PendingSave(folder, wait)


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill a sharded state dict of this layout from a folder. Collective; see the module's note.

    Raises:
        CheckpointRefused: when there is no whole checkpoint.
    """
    from megatron.core import dist_checkpointing

    with together():
        if not (folder / "metadata.json").is_file():
            raise CheckpointRefused(f"{folder} holds no whole Megatron checkpoint")
    with adapted():
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    return loaded


def _strategy(group: dist.ProcessGroup | None) -> Any:
    """How sharded tensors are written. A class of megatron-core's, so made when it is needed."""
    from megatron.core.dist_checkpointing.strategies import torch as megatron_torch

    dcp: Any = torch.distributed.checkpoint  # its names are not exported to type checkers

    class InThreads(megatron_torch.TorchDistSaveShardedStrategy):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("torch_dist", 1)
            self._pending: Any = None

        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            renamed, _, _ = megatron_torch._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict, self.keep_only_main_replica
            )
            tensors = megatron_torch.mcore_to_pyt_state_dict(renamed, False)
            planner = megatron_torch.MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False
            )
            writer = dcp.FileSystemWriter(checkpoint_dir, sync_files=True)
            if group is None:
                dcp.save(tensors, storage_writer=writer, planner=planner)
            else:
                self._pending = dcp.async_save(
                    tensors, storage_writer=writer, planner=planner, process_group=group
                )

        def finish(self) -> None:
            if self._pending is not None:
                self._pending.result()

    return InThreads()


def rng_state() -> dict[str, Any]:
    """This rank's generators, as tensors."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
