"""Engines whose ranks save shards: the files of a checkpoint, in veRL's convention."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from trinity_events.checkpoints.layout import MODEL_FOLDER
from trinity_events.errors import TrinityError

from ..learning.finite import check_finite, nested_tensors
from ..runtime.collectives import together
from ..storage.durable_files import make_folder, sync_tree, write_json
from ..storage.huggingface_files import UserFiles, write_config, write_user_files
from ..storage.sealed_folders import has_weights
from .adamw import AdamWOptions, apply_adamw_options
from .base import CheckpointedEngine, trained_module
from .buffers import all_buffer_names
from .learning_rate import LearningRate, apply_learning_rate
from .model_folder import FolderReader
from .reshard import (
    has_layout,
    model_from_folder,
    resharded_model,
    shard_file,
    states_of_shards,
)
from .state_files import copied, read_state, write_state

FSDP_CONFIG = "fsdp_config.json"
"""File that veRL's merger of shards reads."""


class WeightChanges:
    """Number of changes of a model's weights: optimizer steps, and loads of any state.

    A copy of weights is current while the number is that of the time at which it was made. (Epoch,
    step) is no identity of weights: a load may bring others at the same step.

    Hooks of torch count, so that steps and loads count too that a user makes on the module or the
    optimizer. Both are collective, so that all ranks agree on whether a copy is current. Writes
    into a tensor are not counted.

    Args:
        module: The model.
        optimizer: Its optimizer; None if it is not trained.
    """

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._count = 0
        for part in module.modules():
            # On every part, as a user may load a state into one of them.
            register: Any = part.register_load_state_dict_post_hook  # it has no annotations
            register(self._add)
        if optimizer is not None:
            optimizer.register_step_post_hook(self._add)

    @property
    def count(self) -> int:
        """Number of changes so far."""
        return self._count

    def _add(self, *_: Any) -> None:
        self._count += 1


class NotTrained(TrinityError):
    """An engine without an optimizer is to save a checkpoint.

    Attributes:
        engine: Name of the engine's class.
    """

    engine: str
    text = (
        "this {engine} was made without an optimizer, so it has nothing to save: save the engine "
        "that trains"
    )


class ShardedEngine(CheckpointedEngine):
    """Engine on FSDP, on one rank.

    Args:
        module: Sharded model.
        optimizer: AdamW of the shards; None for a model that is not trained.
        scheduler: Scheduler of torch for its learning rate; None without an optimizer.
        adamw: Options of the configuration, which win over those of a checkpoint.
        learning_rate: Learning rate of the configuration, which does too; None without an
            optimizer.
    """

    adapters: Any = None
    """Tree of the model's adapters; None if the model itself is trained."""

    def __init__(
        self,
        module: Any,
        optimizer: Any,
        scheduler: Any,
        *,
        adamw: AdamWOptions,
        learning_rate: LearningRate | None,
    ) -> None:
        self.module, self.optimizer, self.scheduler = module, optimizer, scheduler
        self.weight_changes = WeightChanges(module, optimizer)
        self._adamw = adamw
        self._highest_rate = 0.0 if learning_rate is None else learning_rate.highest
        self._loaded_steps = 0

    @property
    def steps(self) -> int:
        """Optimizer steps taken; without an optimizer, those of the checkpoint that was loaded."""
        return self._loaded_steps if self.optimizer is None else int(self.scheduler.last_epoch)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next optimizer step."""
        return float(self.scheduler.get_last_lr()[0])

    @abstractmethod
    def training_files(self, folder: Path) -> dict[Path, dict[str, Any]]:
        """Return the content of this rank's files of optimizer, schedule and random states.

        It is copied to the CPU.
        """

    @abstractmethod
    def _read_shards(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return this rank's model and training state: optimizer, scheduler and random states."""

    @abstractmethod
    def _set_random_states(self, states: dict[str, Any]) -> None:
        """Set the random generators to states of a checkpoint."""

    def _write_checkpoint(self, folder: Path) -> None:
        with together():
            if self.optimizer is None:
                raise NotTrained(type(self).__name__)
            module = trained_module(self)
            file, state = folder / shard_name(saved_part(self)), copied(module.state_dict())
            write_state(file, state, exempt=all_buffer_names(module))
            for path, content in self.training_files(folder).items():
                write_state(path, content)
            if dist.get_rank() == 0:
                write_description(folder, self)

    def _read_checkpoint(self, folder: Path) -> None:
        with together():
            # Read and checked on all ranks before anything is loaded: no rank trains on with half
            # of it.
            model, training = self._read_shards(folder)
            exempt = all_buffer_names(trained_module(self))
            check_finite(nested_tensors(model), str(folder), exempt=exempt)
            if self.optimizer is not None:
                check_finite(
                    nested_tensors(training["optimizer"]), f"the optimizer's state in {folder}"
                )
        reshard(self.module)  # what was gathered of adapters would be of their earlier values
        trained_module(self).load_state_dict(model)
        if self.optimizer is None:
            self._loaded_steps = int(training["scheduler"]["last_epoch"])
            return
        self.optimizer.load_state_dict(training["optimizer"])
        # After the load, which brings back the options of the run that saved.
        apply_adamw_options(self.optimizer, self._adamw)
        self.scheduler.load_state_dict(training["scheduler"])
        apply_learning_rate(self.scheduler, self._highest_rate)
        if "random" in training:
            self._set_random_states(training["random"])

    def _read_model(self, folder: Path, world: int) -> dict[str, Any]:
        """Return this rank's model, from shards of ``world`` ranks or a Hugging Face folder."""
        whole, module, part = folder / MODEL_FOLDER[-1], trained_module(self), saved_part(self)
        # Shards win: a folder next to them is an export, which may be of a narrower dtype.
        if not shard_file(folder, part, world, 0).is_file() and has_weights(whole):
            return model_from_folder(FolderReader(whole), module)
        if world == dist.get_world_size():
            state = read_state(folder / shard_name(part))
            here = module.state_dict()
            if all(has_layout(value, here.get(name)) for name, value in state.items()):
                return state
        return resharded_model(states_of_shards(folder, part, world), module)


def reshard(module: Any) -> None:
    """Free what was gathered of a model's parameters, which are then those of the optimizer."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def shard_name(what: str) -> str:
    """Return the file name of this rank's shard, in veRL's convention."""
    return shard_file(Path(), what, dist.get_world_size(), dist.get_rank()).name


def saved_part(engine: Any) -> str:
    """Return the name of the part that an engine's shards are of: its model, or its adapters."""
    return "model" if getattr(engine, "adapters", None) is None else "adapter"


def description_paths(folder: Path) -> list[Path]:
    """Return what :func:`write_description` writes."""
    return [folder / FSDP_CONFIG, folder / MODEL_FOLDER[-1]]


def write_description(folder: Path, engine: Any) -> None:
    """Write the files that a merger of the shards reads; durable on return. For one rank.

    ``fsdp_config.json`` has the FSDP version and the number of ranks, for veRL's merger.
    ``huggingface`` has what the engine's ``write_description`` writes. The engine may be veRL's.
    """
    is_fsdp1 = bool(FullyShardedDataParallel.fsdp_modules(engine.module))
    write_json(
        folder / FSDP_CONFIG,
        {"FSDP_version": 1 if is_fsdp1 else 2, "world_size": dist.get_world_size()},
    )
    write_model_description(engine, folder / MODEL_FOLDER[-1])


def write_model_description(engine: Any, folder: Path) -> None:
    """Write configuration and tokenizer, of this project's engines and of veRL's."""
    own = getattr(engine, "write_description", None)
    if own is not None:
        own(folder)
        return
    files = getattr(engine, "user_files", None)
    write_huggingface(folder, engine.module, get_tokenizer(engine), files)


def get_tokenizer(engine: Any) -> Any:
    """Return the tokenizer of this project's engines and of veRL's; None if there is none."""
    own = getattr(engine, "tokenizer", None)
    if own is not None:
        return own
    # veRL's tokenizer belongs to the checkpoint manager.
    return getattr(getattr(engine, "checkpoint_manager", None), "processing_class", None)


def write_huggingface(
    folder: Path, module: Any, tokenizer: Any, files: UserFiles | None = None
) -> None:
    """Write configuration, generation defaults and tokenizer; durable on return. For one rank.

    Args:
        folder: Folder to write to.
        module: Model of transformers.
        tokenizer: Its tokenizer, or None.
        files: Files of the folder that the model was loaded from, which are written as they are.
            Without them, generation defaults and tokenizer are written by transformers.
    """
    make_folder(folder)
    write_config(folder, module.config)
    generation = getattr(module, "generation_config", None)
    if files is not None:
        write_user_files(folder, files)
    else:
        if generation is not None:
            # save_pretrained() refuses generation defaults that released models have.
            generation.to_json_file(folder / "generation_config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    sync_tree(folder)
