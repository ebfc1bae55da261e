"""What the helpers may rely on in an engine: this project's own, and veRL's as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

import torch
from msgspec import Struct

NamedTensors: TypeAlias = Iterator[tuple[str, torch.Tensor]]


class LocalShard(Struct, frozen=True):
    """What one rank has of one tensor that has a Hugging Face name."""

    name: str
    tensor: torch.Tensor
    """A view of the parameter, or a copy where its rows lie apart."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where it begins in each dimension."""


class TrainEngine(Protocol):
    """An engine on one rank. Every method is collective: all ranks call it."""

    module: Any
    """The wrapped model; for Megatron a list of its chunks."""

    def get_per_tensor_param(self) -> NamedTensors | tuple[NamedTensors, Any]:
        """Full tensors by Hugging Face name. Every rank must exhaust the iterator.

        veRL from 0.8 on returns it with a PEFT configuration beside it.
        """
        ...

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write model, optimizer and extra state below ``local_path``; on disk on return."""
        ...

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load what :meth:`save_checkpoint` wrote with the same number of ranks."""
        ...


def per_tensor_params(engine: TrainEngine) -> NamedTensors:
    """The engine's tensors, whichever of the two forms it returns, each once.

    veRL's Megatron engine yields a tied embedding a second time when there is a pipeline.
    """
    found = engine.get_per_tensor_param()
    return _each_once(found[0] if isinstance(found, tuple) else found)


def _each_once(tensors: NamedTensors) -> NamedTensors:
    seen: set[str] = set()
    for name, tensor in tensors:
        if name not in seen:
            seen.add(name)
            yield name, tensor
