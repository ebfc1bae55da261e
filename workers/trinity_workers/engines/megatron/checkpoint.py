"""megatron-core's distributed checkpoints: any layout reads what any other wrote.

They are written by torch's own writer in threads, not by megatron-core's, which forks the process
and so wants a main script that can be imported again. The format on disk is the same.

Loading unpickles: megatron-core keeps plain values in ``common.pt`` and an index in ``.metadata``
as pickles. Load checkpoints of people that you would run code of, and no others.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from trinity_events.errors import TrinityError

from ...collectives import together
from ..files import make_folder, sync_tree
from .cpu import adapted


class CheckpointRefused(TrinityError):
    """The checkpoint cannot be written or read as it was asked for."""


class CheckpointFailed(TrinityError):
    """A rank could not write its part of a checkpoint."""


class Background:
    """One thread of this rank that writes, and a process group of its own for its collectives.

    Making one is collective. Saves are written in the order in which they were begun.
    """

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megatron-save")


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


def begin_save(
    state: dict[str, Any],
    folder: Path,
    background: Background | None,
    *,
    value: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> PendingSave:
    """Begin to write a sharded state dict into a new folder. Collective.

    Args:
        state: From ``sharded_state_dict()``.
        folder: Where to; what is there is replaced.
        background: Writes copies while this thread goes on; None writes before it returns.
        value: What is written of a tensor on the meta device, asked for when it is.
    """
    from megatron.core import dist_checkpointing

    with together():
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            make_folder(folder)
    strategy = _strategy(background, value)
    with adapted():
        # Rank 0 writes the plain values here.
        request = dist_checkpointing.save(
            state, str(folder), sharded_strategy=strategy, async_sharded_save=True
        )

    def wait() -> None:
        with together():
            strategy.finish()
        for finalize in request.finalize_fns:  # metadata.json: without it nothing loads
            finalize()
        with together():
            if dist.get_rank() == 0:
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


def _strategy(
    background: Background | None, value: Callable[[torch.Tensor], torch.Tensor] | None
) -> Any:
    """How sharded tensors are written. A class of megatron-core's, so made when it is needed."""
    from megatron.core.dist_checkpointing.strategies import torch as megatron_torch
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    torch_dcp: Any = dcp  # its names are not exported to type checkers

    class Planner(megatron_torch.MCoreSavePlanner):  # type: ignore[misc]
        def lookup_object(self, index: Any) -> Any:
            found = super().lookup_object(index)
            return found if value is None or not isinstance(found, torch.Tensor) else value(found)

    class InThreads(megatron_torch.TorchDistSaveShardedStrategy):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("torch_dist", 1)
            self._pending: Future[None] | None = None

        def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
            if background is not None:
                _copy_tensors(sharded_state_dict)
            renamed, _, _ = megatron_torch._replace_state_dict_keys_with_sharded_keys(
                sharded_state_dict, self.keep_only_main_replica
            )
            tensors = megatron_torch.mcore_to_pyt_state_dict(renamed, False)
            planner = Planner(dedup_replicated_tensors=False, flatten_state_dict=False)
            writer = torch_dcp.FileSystemWriter(checkpoint_dir, sync_files=True)

            def write(group: dist.ProcessGroup | None = None) -> None:
                try:
                    torch_dcp.save(
                        tensors, storage_writer=writer, planner=planner, process_group=group
                    )
                except torch_dcp.CheckpointException as error:  # no Exception; on all ranks alike
                    rank, (cause, _) = next(iter(error.failures.items()))
                    raise CheckpointFailed(f"rank {rank} could not write: {cause}") from None

            if background is None:
                write()
            else:
                self._pending = background.thread.submit(write, background.group)
            return AsyncRequest(None, (), [])

        def finish(self) -> None:
            if self._pending is not None:
                self._pending.result()

    return InThreads()


def _copy_tensors(state: Any) -> None:
    """Put copies on the CPU in the place of the tensors, which training will change."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    for one in nested_values(state):
        if isinstance(one, ShardedTensor) and one.data is not None:
            one.data = one.data.detach().to("cpu", copy=True)
