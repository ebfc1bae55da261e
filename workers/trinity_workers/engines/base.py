"""Interface of an engine that the helpers use, for this project's engines and veRL's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch
from msgspec import Struct

from .model_memory import Part

NamedTensors: TypeAlias = Iterator[tuple[str, torch.Tensor]]


class LocalShard(Struct, frozen=True):
    """Part of one tensor on one rank, under the tensor's Hugging Face name."""

    name: str
    tensor: torch.Tensor
    """View of the parameter, or a copy if its rows are not contiguous."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Offset of the shard in each dimension."""


class TrainEngine(Protocol):
    """Engine on one rank. Every method is collective: all ranks call it."""

    module: Any
    """Wrapped model; for Megatron a list of its chunks."""

    def get_per_tensor_param(self) -> NamedTensors | tuple[NamedTensors, Any]:
        """Return full tensors by Hugging Face name. Every rank must exhaust the iterator.

        veRL returns them with a PEFT configuration, from version 0.8 on.
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
    """Return the engine's tensors in either form of its interface, each one once.

    veRL's Megatron engine yields a tied embedding twice if there is a pipeline.
    """
    found = engine.get_per_tensor_param()
    return _each_once(found[0] if isinstance(found, tuple) else found)


def trained_module(engine: Any) -> Any:
    """Return the module of the tensors that are trained: the engine's adapters, or its model."""
    adapters = getattr(engine, "adapters", None)
    return engine.module if adapters is None else adapters


def resident(model: Any, *parts: Part) -> AbstractContextManager[None]:
    """Return a block in which these parts of a model are on its device; by default its parameters.

    Engines without offload, and veRL's, need none.
    """
    block = getattr(model, "resident", None)
    found: AbstractContextManager[None] = nullcontext() if block is None else block(*parts)
    return found


def _each_once(tensors: NamedTensors) -> NamedTensors:
    seen: set[str] = set()
    for name, tensor in tensors:
        if name not in seen:
            seen.add(name)
            yield name, tensor
