"""Loading of FSDP shards in another layout, or number of ranks, than they were saved with.

Every rank maps all shard files into memory and copies the elements that are its own: no rank holds
a full tensor, and nothing is gathered.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trinity_events.errors import TrinityError
from trinity_events.weights.slices import TensorSlice, coverage_error, full_slice, intersection

from .model_folder import FolderReader, are_equal, check_all_used
from .shard_slices import HeldSlice, find_held_slice
from .state_files import read_state

_SHARD_FILE = re.compile(r"(?:model|optim)_world_size_(\d{1,6})_rank_0\.pt")


class ReshardRefused(TrinityError):
    """Shards cannot be loaded at this number of ranks.

    Attributes:
        fault: ``ranks`` if there are shards of several numbers of them, ``tensor`` if one is
            missing, ``model`` if the model has others, ``layout`` if one is not in even chunks,
            ``shape`` if it has another one.
        folder: Folder of the shards.
        ranks: Numbers of ranks.
        tensor: Name of a tensor.
        placement: Its placement.
        saved: Its shape in the shards.
        shape: Its shape in the model.
    """

    is_lasting = True

    fault: Literal["ranks", "tensor", "model", "layout", "shape"]
    folder: Path | None = None
    ranks: tuple[int, ...] = ()
    tensor: str = ""
    placement: str = ""
    saved: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    texts: ClassVar = {
        "ranks": "{folder} has shards of {_ranks} ranks: start as many ranks as one of them",
        "tensor": "{folder} has no tensor {tensor}: is its config.json the one of its weights?",
        "model": "the saved shards and the model here do not both have {tensor}: is it a "
        "checkpoint of this model?",
        "layout": "the saved shards have a tensor that is laid out as {placement}, and even chunks "
        "alone can be joined: save it from FSDP2",
        "shape": "the saved shards have a tensor of shape {saved} that has {shape} here: is it a "
        "checkpoint of this model?",
    }

    @property
    def _ranks(self) -> str:
        return " and ".join(map(str, self.ranks))


def shard_file(folder: Path, what: str, world: int, rank: int) -> Path:
    """Return the path of a rank's shard, in veRL's convention."""
    return folder / f"{what}_world_size_{world}_rank_{rank}.pt"


def saved_world(folder: Path) -> int:
    """Return the number of ranks that a folder's shards were saved with.

    It is this group's number of ranks if the folder has shards of it, or no shards at all.
    """
    world = dist.get_world_size()
    here = any(shard_file(folder, what, world, 0).is_file() for what in ("model", "optim"))
    if not folder.is_dir() or here:
        return world
    worlds = _worlds(folder)
    if len(worlds) > 1:
        raise _several(folder, worlds)
    return worlds[0] if worlds else world


def _worlds(folder: Path) -> list[int]:
    """Return the numbers of ranks that a folder has shards of."""
    matches = (_SHARD_FILE.fullmatch(path.name) for path in folder.iterdir())
    return sorted({int(match[1]) for match in matches if match})


def _several(folder: Path, worlds: Sequence[int]) -> ReshardRefused:
    return ReshardRefused("ranks", folder, tuple(worlds))


def tensors_of_shards(
    folder: Path,
    names: Iterable[str] | None = None,
    *,
    part: str = "model",
    ties: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield full tensors from the shard files of all ranks, without a process group.

    Args:
        folder: Folder of the files.
        names: Names of the tensors; by default all.
        part: Part that the files are of, as `saved_part` names it.
        ties: Further names of tensors, which the files may have too, with equal values.

    Raises:
        FileNotFoundError: if a shard file is missing.
        UnusedTensors: if the files have tensors of other names, or a tied one differs.
        ReshardRefused: if files of several numbers of ranks are there, or a tensor is missing.
    """
    [world, *others] = _worlds(folder)
    if others:
        raise _several(folder, [world, *others])
    with _no_mesh_warnings():
        states = states_of_shards(folder, part, world)
    selected = list(states[0] if names is None else names)
    # Only where the values are equal: a tie that training has undone would lose a tensor.
    ties = {name: first for name, first in (ties or {}).items() if _are_equal(states, name, first)}
    check_all_used(folder, states[0], {*selected, *ties})
    for name in selected:
        if name not in states[0]:
            raise ReshardRefused("tensor", folder, tensor=name)
        yield name, _joined([state[name] for state in states])


def _are_equal(states: Sequence[dict[str, Any]], name: str, other: str) -> bool:
    """Return True if all ranks have two tensors, with equal values."""
    return all(
        name in state and other in state and are_equal(_rows(state[name]), _rows(state[other]))
        for state in states
    )


def _rows(value: torch.Tensor) -> torch.Tensor:
    """Return what a rank has of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def states_of_shards(folder: Path, what: str, world: int) -> list[dict[str, Any]]:
    """Return the states of all ranks that saved, in mapped files."""
    files = (shard_file(folder, what, world, rank) for rank in range(world))
    return [read_state(file, mapped=True) for file in files]


def _joined(values: Sequence[Any]) -> torch.Tensor:
    """Return a full tensor of the shards of all ranks."""
    first = values[0]
    if not isinstance(first, DTensor):
        whole: torch.Tensor = first
        return whole
    return _assembled(values, full_slice(first.shape))


@contextmanager
def _no_mesh_warnings() -> Iterator[None]:
    """Silence torch, which warns of each sharded tensor that is read without its process group."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def resharded_model(states: Sequence[dict[str, Any]], module: Any) -> dict[str, Any]:
    """Return this rank's state dict, from the state dicts of all ranks that saved.

    Raises ReshardRefused unless the states have the module's tensors, and no others.
    """
    different = sorted(module.state_dict().keys() ^ states[0].keys())
    if different:
        raise ReshardRefused("model", tensor=different[0])
    return {
        name: _resharded([state[name] for state in states], like)
        for name, like in module.state_dict().items()
    }


def model_from_folder(reader: FolderReader, module: Any) -> dict[str, Any]:
    """Return this rank's state dict, from the full tensors of a Hugging Face folder.

    A tied tensor is read under whichever of its names the folder has.

    Raises IncompatibleWeights unless the folder has the module's tensors, and no others.
    """
    check_all_used(reader.folder, reader.names(), module.state_dict().keys())
    parameters = {
        name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    # By identity: tied parameters are one tensor under several names.
    saved = {parameters.get(name, name): name for name in reader.names()}
    return {
        name: _slice_full_tensor(reader.tensor(saved.get(parameters.get(name, name), name)), like)
        for name, like in module.state_dict().items()
    }


def resharded_optimizer(states: Sequence[dict[str, Any]], optimizer: Any) -> dict[str, Any]:
    """Return this rank's optimizer state dict, from those of all ranks that saved."""
    parameters, first = _parameters(optimizer), states[0]
    return {
        "param_groups": first["param_groups"],
        "state": {
            index: {
                key: _resharded([state["state"][index][key] for state in states], parameters[index])
                for key in values
            }
            for index, values in first["state"].items()
        },
    }


def has_optimizer_layout(state: dict[str, Any], optimizer: Any) -> bool:
    """Return True if the saved state of an optimizer is laid out as its parameters."""
    parameters = _parameters(optimizer)
    return all(
        has_layout(value, parameters[index])
        for index, values in state["state"].items()
        for value in values.values()
    )


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    # By index, as torch names a parameter's state: the order of parameters is the model's.
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def has_layout(value: Any, like: Any) -> bool:
    """Return True if a saved value is laid out as a tensor here, so that each rank has its own."""
    if not isinstance(value, DTensor) or not isinstance(like, DTensor):
        return not isinstance(value, DTensor)
    return (value.placements, value.device_mesh.shape) == (like.placements, like.device_mesh.shape)


def _resharded(values: Sequence[Any], like: Any) -> Any:
    """Return this rank's share of a value, laid out as ``like``; a plain value is rank 0's."""
    if not isinstance(values[0], DTensor):
        return values[0]
    if values[0].shape != like.shape:
        raise ReshardRefused("shape", saved=tuple(values[0].shape), shape=tuple(like.shape))
    return _laid_out(_assembled(values, _held_slice(like, dist.get_rank()).place), like)


def _slice_full_tensor(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of a full tensor, laid out as ``like`` and in its dtype."""
    value = value.to(like.dtype)
    if not isinstance(like, DTensor):
        return value
    if value.shape != like.shape:
        raise ReshardRefused("shape", saved=tuple(value.shape), shape=tuple(like.shape))
    own = _held_slice(like, dist.get_rank()).place
    # A copy, as the tensor may be a view of a mapped file.
    return _laid_out(value[own.inside(full_slice(value.shape))].clone(), like)


def _assembled(shards: Sequence[DTensor], target: TensorSlice) -> torch.Tensor:
    """Return a slice of a tensor, on the CPU, from the shards of all ranks that saved."""
    local = torch.empty(target.shape, dtype=shards[0].dtype)
    # One rank's of what several hold alike.
    parts = [
        (part.place, shard.to_local())
        for rank, shard in enumerate(shards)
        if (part := _held_slice(shard, rank)).is_first
    ]
    # Else elements that no shard has would be left as empty() found them.
    if any(place.shape != rows.shape for place, rows in parts) or coverage_error(
        target, [place for place, _ in parts]
    ):
        raise _refused_layout(shards[0])
    for place, rows in parts:
        common = intersection(target, place)
        if common is not None:
            local[common.inside(target)] = rows[common.inside(place)]
    return local


def _held_slice(tensor: DTensor, rank: int) -> HeldSlice:
    """Return the slice of a tensor that a rank of the group holds, or held when it saved."""
    [coordinate] = (tensor.device_mesh.mesh == rank).nonzero().tolist()
    part = find_held_slice(tensor, coordinate)
    if part is None:
        raise _refused_layout(tensor)
    return part


def _refused_layout(tensor: DTensor) -> ReshardRefused:
    return ReshardRefused("layout", placement=str(list(tensor.placements)))


def _laid_out(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return this rank's share as a tensor laid out as ``like``."""
    # run_check would exchange the shapes: a collective, while a rank may still fail to read.
    return DTensor.from_local(
        local.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
