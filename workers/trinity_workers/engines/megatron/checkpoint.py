"""Distributed checkpoints of megatron-core: any layout reads the files of any other.

Threads write them with torch's own writer. megatron-core's writer forks the process, and so
requires a main script that can be imported again. The format on disk is the same.

megatron-core stores plain values in ``common.pt`` and an index in ``.metadata`` as pickles. They
are read without running code: see :mod:`.checkpoint_reader`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from trinity_events.coordinator import PlannedSave
from trinity_events.errors import TrinityError

from ...learning.finite import NonFiniteWeights, check_finite, nested_tensors
from ...runtime.collectives import summed, together
from ...storage.durable_files import make_folder, sync_tree, system_errors, whole_file
from ..state_files import copied, write_state
from .checkpoint_errors import ForeignCheckpoint
from .checkpoint_reader import IndexedReader, load_strategies, read_plain
from .cpu import adapted
from .rank_state import rank_file

_torch_dcp: Any = dcp  # its names are not exported to type checkers


class CheckpointFailed(TrinityError):
    """A rank could not write its part of a checkpoint.

    Attributes:
        rank: The rank.
        reason: Its error.
    """

    rank: int
    reason: str
    text = "rank {rank} could not write: {reason}"


def prepare(
    state: dict[str, Any],
    folder: Path,
    *,
    group: dist.ProcessGroup | None = None,
    copy: bool = False,
    value: Callable[[torch.Tensor], torch.Tensor] | None = None,
    own: dict[str, Any] | None = None,
) -> PlannedSave:
    """Prepare a sharded state dict for writing into a new folder. Collective.

    Args:
        state: From ``sharded_state_dict()``.
        folder: Folder to write to; its content is replaced.
        group: Process group for the writing; by default the default group.
        copy: If True, copy everything to the CPU, so that training may continue meanwhile.
        value: Returns the value of a tensor on the meta device, when it is written.
        own: State of this rank alone, for a file of its own.

    Returns:
        What writes it durably, with the bytes of the tensors of all ranks, each replica once.
        Collective; any one thread may call it. It raises on all ranks what failed on one, such as
        NonFiniteWeights.
    """
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies import torch as megatron_torch

    with adapted():
        sharded, plain = save_preprocess(state)
        # One of all replicas is kept; the others take no memory when they are copied.
        mine, _, _ = megatron_torch._replace_state_dict_keys_with_sharded_keys(sharded, True)
        if copy:
            _copy_tensors(mine)
            plain = copied(plain)
        tensors = megatron_torch.mcore_to_pyt_state_dict(mine, False)
    # Now, in the calling thread: the group of the writing is for the thread that writes.
    nbytes = summed(sum(tensor.nbytes for _, tensor in _named_tensors(mine)))
    planner = _planner(value)

    def write() -> None:
        with together(group):  # before the folder's content is replaced
            check_finite(_named_tensors(mine), str(folder))
        with together(group):
            if dist.get_rank() == 0:
                # Files of an earlier attempt, perhaps of other ranks, would be read as parts of
                # this one.
                shutil.rmtree(folder, ignore_errors=True)
                make_folder(folder)
                with whole_file(folder / "common.pt") as file:
                    torch.save(plain, file)
        writer = DurableWriter(folder)
        try:
            _torch_dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group)
        # not an Exception; raised on all ranks alike
        except _torch_dcp.CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            if isinstance(cause, NonFiniteWeights):  # of a value that was made as it was written
                raise cause from None
            raise CheckpointFailed(rank, str(cause)) from None
        with together(group):
            if own is not None:
                write_state(rank_file(folder, dist.get_rank()), own)
        with together(group):
            if dist.get_rank() == 0:
                _make_whole(folder)

    return PlannedSave(save=write, nbytes=nbytes)


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill a sharded state dict of this layout from a folder. Collective.

    Raises:
        CheckpointRefused: if there is no complete checkpoint.
        UnsafePickle: if a pickle in it names a class that no checkpoint needs.
        NonFiniteWeights: if a tensor of this rank has values that are not finite.
        PeerFailed: on the other ranks then.
    """
    from megatron.core import dist_checkpointing

    with together():
        # It is written last, so that a save that broke off has none.
        if not (folder / "metadata.json").is_file():
            raise ForeignCheckpoint(folder, "incomplete")
        strategies = load_strategies(read_plain(folder / "common.pt"), IndexedReader(folder))
    with adapted():
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder), *strategies)
    with together():
        check_finite(nested_tensors(loaded), str(folder))
    return loaded


class DurableWriter(dcp.FileSystemWriter):  # type: ignore[name-defined,misc]
    """Writer of torch's distributed checkpoints, whose errors are the system's own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True)
        self._folder = folder

    def write_data(self, *args: Any, **options: Any) -> Any:
        """Write this rank's tensors. Raises OSError if the system refuses them."""
        with system_errors(self._folder):
            return super().write_data(*args, **options)


def _planner(value: Callable[[torch.Tensor], torch.Tensor] | None) -> Any:
    """Return a save planner. Its base class is megatron-core's, so it is defined on demand."""
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner

    class Planner(MCoreSavePlanner):  # type: ignore[misc]
        def lookup_object(self, index: Any) -> Any:
            data = super().lookup_object(index)
            return data if value is None or not isinstance(data, torch.Tensor) else value(data)

    return Planner(dedup_replicated_tensors=False, flatten_state_dict=False)


def _make_whole(folder: Path) -> None:
    """Write the files without which nothing loads, and make the folder durable."""
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    sync_tree(folder)


def _named_tensors(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a sharded state dict that are on this rank, by their keys."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    for value in nested_values(state):
        if isinstance(value, ShardedTensor) and value.data is not None:
            yield value.key, value.data


def _copy_tensors(state: Any) -> None:
    """Replace the tensors by copies on the CPU, since training changes the originals."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    for value in nested_values(state):
        if isinstance(value, ShardedTensor) and value.data is not None:
            value.data = value.data.detach().to("cpu", copy=True)
