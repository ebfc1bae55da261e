"""Interface of an engine that the helpers use, for this project's engines and veRL's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch
from msgspec import Struct

from trinity_events.errors import TrinityError

from .model_memory import Part

NamedTensors: TypeAlias = Iterator[tuple[str, torch.Tensor]]


class ArgumentRefused(TrinityError):
    """Raised if an engine's method is given an argument that it does not have.

    The arguments are those of veRL's engines, so that the same calls work on both.

    Attributes:
        engine: Name of the engine's class.
        method: Name of the method.
        argument: Name of the argument.
        value: Its value.
        alternative: What to do instead.
    """

    def __init__(
        self, engine: object, method: str, argument: str, value: object, alternative: str
    ) -> None:
        self.engine, self.method = type(engine).__name__, method
        self.argument, self.value, self.alternative = argument, value, alternative
        super().__init__(
            f"{self.engine}.{method}() does not support {argument}={value!r}: {alternative}"
        )


def refuse_save_arguments(
    engine: object, hdfs_path: str | None, max_ckpt_to_keep: int | None
) -> None:
    """Raise ArgumentRefused for arguments of ``save_checkpoint`` without an effect."""
    if hdfs_path is not None:
        raise ArgumentRefused(
            engine, "save_checkpoint", "hdfs_path", hdfs_path, "copy the files of local_path"
        )
    if max_ckpt_to_keep is not None:
        raise ArgumentRefused(
            engine,
            "save_checkpoint",
            "max_ckpt_to_keep",
            max_ckpt_to_keep,
            "remove older checkpoints yourself; of a run, the reducer does it (checkpoints.keep)",
        )


def refuse_load_arguments(
    engine: object, hdfs_path: str | None, del_local_after_load: bool
) -> None:
    """Raise ArgumentRefused for arguments of ``load_checkpoint`` without an effect."""
    if hdfs_path is not None:
        raise ArgumentRefused(
            engine,
            "load_checkpoint",
            "hdfs_path",
            hdfs_path,
            "copy the files to this host and name their folder as local_path",
        )
    if del_local_after_load:
        raise ArgumentRefused(
            engine,
            "load_checkpoint",
            "del_local_after_load",
            del_local_after_load,
            "local_path may be the only copy of the checkpoint: remove it yourself",
        )


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
        """Write model, optimizer and extra state below ``local_path``; on disk on return.

        Args:
            local_path: Folder to write to.
            hdfs_path: Not supported by this project's engines.
            global_step: The step, which nothing depends on: ``local_path`` names it.
            max_ckpt_to_keep: Not supported by this project's engines.

        Raises:
            ArgumentRefused: for another value than the default where it is not supported.
        """
        ...

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load what :meth:`save_checkpoint` wrote with the same number of ranks.

        Args:
            local_path: Folder to load from.
            hdfs_path: Not supported by this project's engines.
            del_local_after_load: Not supported by this project's engines.

        Raises:
            ArgumentRefused: for another value than the default where it is not supported.
        """
        ...


def per_tensor_params(engine: TrainEngine) -> NamedTensors:
    """Return the engine's tensors in either form of its interface, each one once.

    veRL's Megatron engine yields a tied embedding twice if there is a pipeline.
    """
    parameters = engine.get_per_tensor_param()
    return _each_once(parameters[0] if isinstance(parameters, tuple) else parameters)


def trained_module(engine: Any) -> Any:
    """Return the module of the tensors that are trained: the engine's adapters, or its model."""
    adapters = getattr(engine, "adapters", None)
    return engine.module if adapters is None else adapters


def resident(model: Any, *parts: Part) -> AbstractContextManager[None]:
    """Return a block in which these parts of a model are on its device; by default its parameters.

    Engines without offload, and veRL's, need none.
    """
    block = getattr(model, "resident", None)
    context: AbstractContextManager[None] = nullcontext() if block is None else block(*parts)
    return context


def _each_once(tensors: NamedTensors) -> NamedTensors:
    seen: set[str] = set()
    for name, tensor in tensors:
        if name not in seen:
            seen.add(name)
            yield name, tensor
