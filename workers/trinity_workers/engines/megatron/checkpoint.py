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
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from trinity_events.errors import TrinityError

from ...collectives import together
from ..state_files import copied, make_folder, sync_tree
from .cpu import adapted

_torch_dcp: Any = dcp  # its names are not exported to type checkers

Write: TypeAlias = Callable[[], None]
"""Writes a checkpoint that was prepared; on disk on return. Collective, on any one thread."""


class CheckpointRefused(TrinityError):
    """The checkpoint cannot be written or read as it was asked for."""


class CheckpointFailed(TrinityError):
    """A rank could not write its part of a checkpoint."""


def prepare(
    state: dict[str, Any],
    folder: Path,
    *,
    group: dist.ProcessGroup | None = None,
    copy: bool = False,
    value: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Write:
    """Make a sharded state dict ready to be written into a new folder. Collective.

    Args:
        state: From ``sharded_state_dict()``.
        folder: Where to; what is there is replaced.
        group: The ranks' group that the writing talks over; the default one when left out.
        copy: Whether to copy everything to the CPU, so that training may change it meanwhile.
        value: What is written of a tensor on the meta device, asked for when it is.

    Returns:
        What writes it. It raises on all ranks what failed on one.
    """
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies import torch as megatron_torch

    with adapted():
        sharded, plain = save_preprocess(state)
        # Of replicas, one is kept, and the others take no room when they are copied.
        mine, _, _ = megatron_torch._replace_state_dict_keys_with_sharded_keys(sharded, True)
        if copy:
            _copy_tensors(mine)
            plain = copied(plain)
        tensors = megatron_torch.mcore_to_pyt_state_dict(mine, False)
    planner = _planner(value)

    def write() -> None:
        with together(group):
            if dist.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
                make_folder(folder)
                torch.save(plain, folder / "common.pt")
        writer = _torch_dcp.FileSystemWriter(folder, sync_files=True)
        try:
            _torch_dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group)
        except _torch_dcp.CheckpointException as error:  # no Exception; on all ranks alike
            rank, (cause, _) = next(iter(error.failures.items()))
            raise CheckpointFailed(f"rank {rank} could not write: {cause}") from None
        with together(group):
            if dist.get_rank() == 0:
                _make_whole(folder)

    return write


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill a sharded state dict of this layout from a folder. Collective; see the module's note.

    Raises:
        CheckpointRefused: when there is no whole checkpoint.
    """
    from megatron.core import dist_checkpointing

    with together():
        if not (folder / "metadata.json").is_file():
            raise CheckpointRefused(
                f"{folder} holds no whole Megatron checkpoint (no metadata.json): its save was not "
                "finished, or it is of another format"
            )
    with adapted():
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    return loaded


def _planner(value: Callable[[torch.Tensor], torch.Tensor] | None) -> Any:
    """What says what is written. Of a class of megatron-core's, so made when it is needed."""
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

    class Planner(MCoreSavePlanner):  # type: ignore[misc]
        def lookup_object(self, index: Any) -> Any:
            found = super().lookup_object(index)
            return found if value is None or not isinstance(found, torch.Tensor) else value(found)

    return Planner(dedup_replicated_tensors=False, flatten_state_dict=False)


def _make_whole(folder: Path) -> None:
    """Write what nothing loads without, and make all of it durable."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    sync_tree(folder)


def _copy_tensors(state: Any) -> None:
    """Put copies on the CPU in the place of the tensors, which training will change."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    for one in nested_values(state):
        if isinstance(one, ShardedTensor) and one.data is not None:
            one.data = one.data.detach().to("cpu", copy=True)
