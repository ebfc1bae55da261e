"""State on disk, written atomically and durably, and read without executing code."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor  # without it, torch.load refuses sharded tensors

from ..learning.finite import check_finite, local_tensors, nested_tensors
from ..storage.durable_files import whole_file


def copied(value: Any) -> Any:
    """Return the same structure with every tensor copied to the CPU, sharded ones too."""
    # copy=True: a tensor that is on the CPU already would be changed by the next step.
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copied(item) for item in value]
    return value


def count_bytes(state: Any) -> int:
    """Return the bytes of the tensors in a state, of sharded ones those of this rank."""
    tensors = chain.from_iterable(local_tensors(tensor) for _, tensor in nested_tensors(state))
    return sum(tensor.nbytes for tensor in tensors)


def write_state(path: Path, state: dict[str, Any], *, exempt: Collection[str] = ()) -> None:
    """Write the file durably, complete or not at all.

    Args:
        path: The file.
        state: Tensors and plain values.
        exempt: Names of tensors that may have values that are not finite, such as buffers.

    Raises:
        NonFiniteWeights: if another tensor has some; nothing is written then.
    """
    check_finite(nested_tensors(state), str(path), exempt=exempt)
    with whole_file(path) as file:
        torch.save(state, file)


def read_state(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read a file of :func:`write_state`: only tensors and plain values, no code is executed.

    ``mapped`` tensors are read from the file when they are used.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there: a checkpoint has one file for each rank that saved it"
        )
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    return state
