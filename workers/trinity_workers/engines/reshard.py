"""Loading of FSDP shards at another number of ranks than they were saved with.

Every rank maps all shard files into memory and copies the rows that are its own: no rank holds a
full tensor, and nothing is gathered.
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
from torch.distributed.tensor import DTensor, Shard

from trinity_events.errors import TrinityError

from .model_folder import FolderReader, are_equal, check_all_used
from .state_files import read_state

_SHARD_FILE = re.compile(r"(?:model|optim)_world_size_(\d{1,6})_rank_0\.pt")


class ReshardRefused(TrinityError):
    """Shards cannot be loaded at this number of ranks.

    Attributes:
        fault: ``ranks`` if there are shards of several numbers of them, ``tensor`` if one is
            missing, ``model`` if the model has others, ``joined`` and ``loaded`` if a tensor is not
            sharded by rows, ``rows`` if it has other rows.
        folder: Folder of the shards.
        ranks: Numbers of ranks.
        tensor: Name of a tensor.
        saved: Rows that the shards have.
        rows: Rows of the model's tensor.
    """

    is_lasting = True

    fault: Literal["ranks", "tensor", "model", "joined", "loaded", "rows"]
    folder: Path | None = None
    ranks: tuple[int, ...] = ()
    tensor: str = ""
    saved: int = 0
    rows: int = 0
    texts: ClassVar = {
        "ranks": "{folder} has shards of {_ranks} ranks: start as many ranks as one of them",
        "tensor": "{folder} has no tensor {tensor}: is its config.json the one of its weights?",
        "model": "the saved shards and the model here do not both have {tensor}: is it a "
        "checkpoint of this model?",
        "joined": "only tensors that FSDP shards by rows can be joined",
        "loaded": "only tensors that FSDP shards by rows load at another number of ranks",
        "rows": "the saved shards have {saved} rows of a tensor that has {rows} here: is it a "
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
    if list(first.placements) != [Shard(0)]:
        raise ReshardRefused("joined")
    return torch.cat([value.to_local() for value in values])


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
    # By index, as torch names a parameter's state: the order of parameters is the model's.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    first = states[0]
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


def _resharded(values: Sequence[Any], like: Any) -> Any:
    """Return this rank's share of a value, laid out as ``like``; a plain value is rank 0's."""
    if not isinstance(values[0], DTensor):
        return values[0]
    if not isinstance(like, DTensor) or list(like.placements) != [Shard(0)]:
        raise ReshardRefused("loaded")
    return _laid_out([value.to_local() for value in values], like)


def _slice_full_tensor(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of a full tensor, laid out as ``like`` and in its dtype."""
    value = value.to(like.dtype)
    return _laid_out([value], like) if isinstance(like, DTensor) else value


def _laid_out(shards: Sequence[torch.Tensor], like: DTensor) -> DTensor:
    """Return this rank's rows of consecutive shards."""
    # (rows of this rank, ...). On the CPU, since the shards are mapped files.
    local = torch.empty_like(like.to_local(), dtype=shards[0].dtype, device="cpu")
    first = _first_row(like)
    offset = 0
    for rows in shards:
        begin, end = max(first, offset), min(first + len(local), offset + len(rows))
        if begin < end:
            local[begin - first : end - first] = rows[begin - offset : end - offset]
        offset += len(rows)
    # Else rows that no shard has would be left as empty_like() found them.
    if offset != like.shape[0]:
        raise ReshardRefused("rows", saved=offset, rows=like.shape[0])
    # run_check would exchange the shapes: a collective, while a rank may still fail to read.
    return DTensor.from_local(
        local.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _first_row(tensor: DTensor) -> int:
    """Return the index of this rank's first row: torch cuts rows into chunks of one size."""
    world, rank = tensor.device_mesh.size(), tensor.device_mesh.get_local_rank()
    # As torch.chunk(): all chunks but the last are rounded up, and the last ranks may have none.
    chunk = -(-tensor.shape[0] // world)
    return min(rank * chunk, tensor.shape[0])
