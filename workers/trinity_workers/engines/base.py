"""Engines on one rank: the interface that the helpers use, and how checkpoints are saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from msgspec import Struct

from trinity_events.checkpoints.verification import VerifyMode
from trinity_events.errors import TrinityError

from ..storage.load_verification import verify_together, write_manifest_together
from .model_memory import ALL, OffloadedModel, Part
from .offload import FrozenOffload

NamedTensors: TypeAlias = Iterator[tuple[str, torch.Tensor]]


class ArgumentRefused(TrinityError):
    """An engine's method is given an argument that it does not have.

    The arguments are those of veRL's engines, so that the same calls work on both.

    Attributes:
        engine: Name of the engine's class.
        method: Name of the method.
        argument: Name of the argument.
        value: Its value.
        alternative: What to do instead.
    """

    engine: str
    method: str
    argument: str
    value: object
    alternative: str
    text = "{engine}.{method}() does not support {argument}={value!r}: {alternative}"


class LocalShard(Struct, frozen=True):
    """Part of one tensor on one rank, under the tensor's Hugging Face name."""

    name: str
    tensor: torch.Tensor
    """View of the parameter, or a copy if its rows are not contiguous."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Offset of the shard in each dimension."""


class TrainEngine(Protocol):
    """Engine whose weights the helpers publish, on one rank; veRL's engines are such, unchanged."""

    module: Any
    """Wrapped model; for Megatron a list of its chunks."""

    def get_per_tensor_param(self) -> NamedTensors | tuple[NamedTensors, Any]:
        """Return full tensors by Hugging Face name. Collective: every rank exhausts the iterator.

        veRL returns them with a PEFT configuration, from version 0.8 on.
        """
        ...


class CheckpointedEngine(ABC):
    """Engine of this project: the order in which checkpoints are saved and loaded.

    1. Arguments without an effect are refused before anything is read or written.
    2. The manifest is written last, after the files of all ranks.
    3. Every file is verified, on all ranks together, before any of them is read.
    4. What left the device is back on it while its files are written or read.

    An engine gives what differs: which files there are, and what they hold.
    """

    module: Any
    verify_mode: VerifyMode = "full"
    """Extent to which :meth:`load_checkpoint` verifies files before it reads them."""
    _memory = OffloadedModel(FrozenOffload(), tuple)
    """Parts of the model; by default none leaves the device."""

    def resident(self, *parts: Part) -> AbstractContextManager[None]:
        """Return a block in which these parts are on the device; by default the parameters.

        Tensors that share memory with a parameter are valid in such a block alone.
        """
        return self._memory.resident(*parts)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write model and training state below ``local_path``; durable on return. Collective.

        ``global_step`` has no effect: ``local_path`` names the step.

        Raises:
            ArgumentRefused: for ``hdfs_path`` and ``max_ckpt_to_keep``.
            CheckpointRefused: if Megatron's optimizer state would not load again.
            NonFiniteWeights: if parameters or optimizer state are not finite.
            PeerFailed: on the ranks that did not fail themselves.
        """
        self._refuse_arguments(
            "save_checkpoint",
            ("hdfs_path", hdfs_path, "copy the files of local_path"),
            (
                "max_ckpt_to_keep",
                max_ckpt_to_keep,
                "remove older checkpoints yourself; of a run, the reducer does it "
                "(checkpoints.keep)",
            ),
        )
        folder = Path(local_path)
        with self.resident("parameters", "optimizer"):
            self._write_checkpoint(folder)
        # Last, after the files of all ranks: a listed file is whole.
        write_manifest_together(folder)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load files of :meth:`save_checkpoint`. Collective.

        The model may also be a Hugging Face folder with weights. FSDP and Megatron read the files
        of any number of ranks, veRL those of its own number. A rank continues its random states if
        the checkpoint has them: on FSDP those of the same rank, on Megatron at the same layout.

        Raises:
            ArgumentRefused: for ``hdfs_path`` and ``del_local_after_load``.
            CheckpointDamaged: if a file is not as it was saved; nothing is read then.
            FileNotFoundError: if a shard is missing.
            CheckpointRefused: if Megatron's files are missing, or this layout cannot load them.
            UnsafePickle: if a pickle in it names a class that no checkpoint needs.
            ReshardRefused: if the shards do not fit the model.
            AdaptersRefused: if they are of other adapters, or of another base.
            NonFiniteWeights: if parameters or optimizer state are not finite.
            PeerFailed: if another rank could not read its shard; nothing is loaded then.
        """
        self._refuse_arguments(
            "load_checkpoint",
            (
                "hdfs_path",
                hdfs_path,
                "copy the files to this host and name their folder as local_path",
            ),
            (
                "del_local_after_load",
                # False, the default, asks for nothing: it is no argument to refuse.
                del_local_after_load or None,
                "local_path may be the only copy of the checkpoint: remove it yourself",
            ),
        )
        folder = Path(local_path)
        verify_together(folder, self.verify_mode)
        with self.resident(*ALL):
            self._read_checkpoint(folder)

    @abstractmethod
    def _write_checkpoint(self, folder: Path) -> None:
        """Write this rank's files, durably. Collective; raises on all ranks."""

    @abstractmethod
    def _read_checkpoint(self, folder: Path) -> None:
        """Load from verified files. Collective; raises on all ranks."""

    def _refuse_arguments(self, method: str, *arguments: tuple[str, object, str]) -> None:
        """Raise ArgumentRefused for the first argument (name, value, alternative) with a value."""
        for name, value, alternative in arguments:
            if value is not None:
                raise ArgumentRefused(type(self).__name__, method, name, value, alternative)


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
