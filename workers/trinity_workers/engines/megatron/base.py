"""Model of megatron-core on one rank: its optimizer steps, weights and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct, structs

from trinity_events.checkpoints.layout import MODEL_FOLDER
from trinity_events.coordinator import PlannedSave

from ...runtime.collectives import together
from ...storage.sealed_folders import has_weights
from ..adamw import AdamWOptions, apply_adamw_options
from ..base import CheckpointedEngine, LocalShard
from ..learning_rate import LearningRate, as_learning_rate
from ..model_memory import Part, holding
from . import checkpoint
from .checkpoint_errors import OtherOptimizer
from .checkpoint_reader import read_plain
from .cpu import adapted
from .distributed_optimizer import FORMAT
from .layout import ParallelLayout
from .model import ModelOptions, is_tied
from .model_description import Description, write_description
from .parameter_slices import ParameterSlice, parameter_slices
from .rank_state import rank_state, restore_rank_state
from .skipped_step import skipped_unless_finite
from .stream import WeightStream, load_folder, local_shards
from .weights import mapping

_HAS_RANDOM_STATES = "has_random_states"
"""Key of a checkpoint's plain values: without it, a missing file of a rank would be no error."""
_OPTIMIZER_KIND = "optimizer_kind"
"""Key of a checkpoint's plain values: the optimizer that can load the state."""


class OptimizerOptions(Struct, frozen=True, kw_only=True):
    """Options of the optimizer."""

    learning_rate: float | LearningRate
    """Learning rate of AdamW; a number is constant."""
    adamw: AdamWOptions = AdamWOptions()
    """Options of AdamW, and the norm to which gradients are clipped."""
    distributed: bool = False
    """If True, each data-parallel replica keeps a part of the optimizer's state."""


class CheckpointManager:
    """Contents that :meth:`MegatronModel.save_checkpoint` writes, as in veRL's engines."""

    def __init__(self) -> None:
        self.checkpoint_save_contents = ["model", "optimizer", "extra"]


class MegatronModel(CheckpointedEngine):
    """Chunks of a model on this rank, whichever library built them, and their optimizer.

    A subclass builds the chunks before it calls this constructor, which is collective. It sets
    ``module`` and ``optimizer`` afterwards, if the model is trained.

    Args:
        description: Configuration, tokenizer and files of the model.
        chunks: This rank's chunks, unwrapped.
        transformer: Configuration of megatron-core that they were built from.
        device: Device of this rank.
        layout: Distribution of the model over the ranks.
        options: Data type, and the kind of layers.
        optimizer: Optimizer options; None for a model without gradients.
    """

    def __init__(
        self,
        description: Description,
        chunks: list[Any],
        *,
        transformer: Any,
        device: torch.device,
        layout: ParallelLayout,
        options: ModelOptions,
        optimizer: OptimizerOptions | None,
    ) -> None:
        self._description = description
        self.config, self.tokenizer = description.config, description.tokenizer
        self.options = options
        self.device = device
        self.layout = layout
        self.checkpoint_manager = CheckpointManager()
        self.steps = 0
        self._optimizer_options = optimizer
        self._transformer = transformer
        self._chunks = chunks
        self._names = mapping(self.config, transformer, layout.tensor)
        self._tied = is_tied(self.config)
        self._stream = WeightStream(chunks, self._names, tied=self._tied, device=device)
        self.module: Any = chunks
        self.optimizer: Any = None

    # --- optimizer steps ----------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next optimizer step."""
        assert self._optimizer_options is not None
        return as_learning_rate(self._optimizer_options.learning_rate).at(self.steps)

    def _set_learning_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate

    def _optimizer_step(self, accumulate: Callable[[], list[Any]]) -> tuple[list[Any], float]:
        """Take a step on gradients that a function accumulates; return its result and their norm.

        The norm is before clipping. If it is not finite, on all ranks alike, the step is skipped:
        parameters, optimizer and schedule stay as they are.
        """
        for chunk in self.module:
            # DDP accumulates into its buffers, which the optimizer's zero_grad() does not clear.
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = accumulate()
        with adapted(), skipped_unless_finite(self.optimizer) as skipped:
            self._set_learning_rate()
            _, norm, _ = self.optimizer.step()
        if skipped.norm is not None:
            return results, skipped.norm
        self.steps += 1
        return results, float(norm)

    # --- weights ------------------------------------------------------------------------------

    def get_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors by Hugging Face name, one gathered at a time. Collective.

        Every rank must exhaust the iterator. A tied tensor appears once, under its first name.
        """
        copy = not self._memory.is_resident()  # else a tensor of one rank alone would be a view
        with self.resident():
            for name, tensor in self._stream:
                yield name, tensor.clone() if copy else tensor

    def local_shards(self) -> Iterator[LocalShard]:
        """Yield this rank's shards of every tensor, by Hugging Face name. Not collective."""
        copy = not self._memory.is_resident()
        with self.resident():
            for shard in local_shards(
                self.config,
                self._transformer,
                self._chunks,
                tied=self._tied,
            ):
                yield structs.replace(shard, tensor=shard.tensor.clone()) if copy else shard

    @holding("parameters")
    def parameter_slices(self) -> list[ParameterSlice]:
        """Return views of this rank's parameters, by their places in the whole ones.

        They have values in a block of :meth:`resident` alone, if the parameters leave the device.
        """
        return [
            parameter_slice
            for chunk in self._chunks
            for parameter_slice in parameter_slices(chunk, self.config.vocab_size)
        ]

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return self._description.end_tokens

    # --- checkpoints --------------------------------------------------------------------------

    def write_description(self, folder: Path) -> None:
        """Write configuration, generation defaults and tokenizer; durable on return."""
        write_description(folder, self._description)

    def _write_checkpoint(self, folder: Path) -> None:
        for write in self.prepare_checkpoint(str(folder), copy=False).values():
            write()

    def prepare_checkpoint(
        self, local_path: str, *, group: dist.ProcessGroup | None = None, copy: bool = True
    ) -> dict[str, PlannedSave]:
        """Prepare the manager's contents for writing. Collective.

        Args:
            local_path: Folder to save to.
            group: Process group for the writing; by default the default group. A thread beside
                training needs a group of its own.
            copy: If True, copy the contents to the CPU, so that training may continue meanwhile.
                What would leave the device after this call is copied anyway.

        Returns:
            What writes ``model`` and ``training``, as far as they are among the contents. All ranks
            call them in this order; each returns when its folder is on disk.
        """
        needed: tuple[Part, ...] = ("parameters", "optimizer")
        copy = copy or not all(map(self._memory.is_resident, needed))
        with self.resident(*needed):
            return self._prepared(Path(local_path), group=group, copy=copy)

    def _prepared(
        self, folder: Path, *, group: dist.ProcessGroup | None, copy: bool
    ) -> dict[str, PlannedSave]:
        contents = set(self.checkpoint_manager.checkpoint_save_contents)
        writes: dict[str, PlannedSave] = {}
        if "model" in contents:
            state = self._model_state()
            write_model = checkpoint.prepare(state, folder / "model", group=group, copy=copy)

            def write() -> None:
                with together(group):
                    if dist.get_rank() == 0:
                        write_description(folder / MODEL_FOLDER[-1], self._description)
                write_model()

            writes["model"] = PlannedSave(save=write, nbytes=write_model.nbytes)
        if contents & {"optimizer", "extra"}:
            state = self._training_state(contents, is_loading=False)
            own = rank_state(self.device, self.layout) if "extra" in contents else None
            writes["training"] = checkpoint.prepare(
                state, folder / "training", group=group, copy=copy, own=own
            )
        return writes

    def _read_checkpoint(self, folder: Path) -> None:
        # Before the model is changed: the engine stays as it was if this refuses.
        self._check_optimizer_kind(folder / "training")
        self._load_model(folder)
        if not (folder / "training").is_dir():
            return
        if self.optimizer is None:
            with together():
                self.steps = read_plain(folder / "training" / "common.pt")["steps"]
        else:
            self._load_training_state(folder / "training")

    def _load_model(self, folder: Path) -> None:
        self._fill_model(folder)
        if self.optimizer is not None:
            # Of a checkpoint of the model alone, the optimizer's float32 copies of bfloat16
            # parameters would be the earlier ones, and its next step would bring them back.
            with adapted():
                self.optimizer.reload_model_params()

    def _fill_model(self, folder: Path) -> None:
        whole = folder / MODEL_FOLDER[-1]
        if not (folder / "model").exists() and has_weights(whole):
            with together():
                load_folder(self._chunks, whole, self._names)
                self._stream.check_all_used(whole)
            return
        loaded = checkpoint.load(self._model_state(), folder / "model")
        for key, chunk in self._keyed_chunks():
            chunk.load_state_dict(loaded[key], strict=False)

    def _keyed_chunks(self) -> list[tuple[str, Any]]:
        return [(f"model{index}", chunk) for index, chunk in enumerate(self._chunks)]

    def _model_state(self) -> dict[str, Any]:
        with adapted():
            return {key: chunk.sharded_state_dict() for key, chunk in self._keyed_chunks()}

    def _training_state(self, contents: set[str], *, is_loading: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"steps": self.steps, _HAS_RANDOM_STATES: "extra" in contents}
        if "optimizer" in contents and self.optimizer is not None:
            state[_OPTIMIZER_KIND] = self._optimizer_kind
            with adapted():
                state["optimizer"] = self.optimizer.sharded_state_dict(
                    self._model_state(), is_loading=is_loading, metadata=FORMAT
                )
        return state

    @property
    def _optimizer_kind(self) -> dict[str, bool]:
        """Return what an optimizer must have in common with the one whose state it loads."""
        assert self._optimizer_options is not None
        return {
            "distributed": self._optimizer_options.distributed,
            # Experts that are spread have an optimizer of their own, beside that of all else.
            "experts": len(self.optimizer.chained_optimizers) > 1,
        }

    def _check_optimizer_kind(self, folder: Path) -> None:
        if self.optimizer is None or not folder.is_dir():
            return
        with together():
            # Checkpoints of earlier versions lack the key; a load tells then.
            kind = self._optimizer_kind
            saved = read_plain(folder / "common.pt").get(_OPTIMIZER_KIND, kind)
            if saved["distributed"] != kind["distributed"]:
                raise OtherOptimizer(folder, "distributed", saved["distributed"])
            if saved["experts"] != kind["experts"]:
                raise OtherOptimizer(folder, "experts", saved["experts"])

    def _load_training_state(self, folder: Path) -> None:
        state = self._training_state({"optimizer", "extra"}, is_loading=True)
        loaded = checkpoint.load(state, folder)
        with adapted():
            self.optimizer.load_state_dict(loaded["optimizer"])
        self._apply_options()
        self.steps = loaded["steps"]
        # Checkpoints of earlier versions lack the key. They were saved with random states, unless
        # `checkpoint_save_contents` left them out.
        if loaded.get(_HAS_RANDOM_STATES, True):
            with together():
                restore_rank_state(folder, self.device, self.layout)

    def _apply_options(self) -> None:
        """Set the configuration's options of the optimizer, whose state was loaded."""
        assert self._optimizer_options is not None
        # After the load, which brings back the options of the run that saved.
        apply_adamw_options(self.optimizer, self._optimizer_options.adamw)
