"""Engine with a Hugging Face model on megatron-core, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct, structs

from trinity_events.checkpoints.layout import MODEL_FOLDER
from trinity_events.coordinator import PlannedSave
from trinity_events.errors import TrinityError

from ...algorithms.batch import Batch
from ...runtime.collectives import together
from ..adamw import AdamWOptions, apply_adamw_options
from ..base import CheckpointedEngine, LocalShard
from ..learning_rate import LearningRate, as_learning_rate
from ..model_folder import has_weights
from ..model_memory import ALL, OffloadedModel, Part, holding, optimizer_tensors
from . import checkpoint
from .checkpoint_errors import OptimizerNotLoadable
from .checkpoint_reader import read_plain
from .cpu import adapted
from .layout import ParallelLayout, join
from .model import ModelOptions, build_chunks, is_tied, transformer_config
from .model_description import Description, read_description, write_description
from .parameter_slices import ParameterSlice, parameter_slices
from .rank_state import rank_state, restore_rank_state
from .skipped_step import skipped_unless_finite
from .stream import WeightStream, load_folder, local_shards
from .training import (
    LossFunction,
    Statistics,
    accumulate_gradients,
    response_logprobs,
    whole_logits,
)
from .weights import mapping

# The only optimizer state format of 0.16 that any layout can read.
_OPTIMIZER_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}

_HAS_RANDOM_STATES = "has_random_states"
"""Key of a checkpoint's plain values: without it, a missing file of a rank would be no error."""


class DeviceRefused(TrinityError):
    """The model cannot be placed on the given device.

    Attributes:
        device: Type of the device.
    """

    device: str
    text = (
        "megatron-core computes on the GPU where there is one, and not on {device}: give each rank "
        "its own, or hide them all (CUDA_VISIBLE_DEVICES=)"
    )


class OptimizerOptions(Struct, frozen=True, kw_only=True):
    """Options of the optimizer."""

    learning_rate: float | LearningRate
    """Learning rate of AdamW; a number is constant."""
    adamw: AdamWOptions = AdamWOptions()
    """Options of AdamW, and the norm to which gradients are clipped."""
    distributed: bool = False
    """If True, each data-parallel replica keeps a part of the optimizer's state."""


class CheckpointManager:
    """Contents that :meth:`MegatronEngine.save_checkpoint` writes, as in veRL's engines."""

    def __init__(self) -> None:
        self.checkpoint_save_contents = ["model", "optimizer", "extra"]


class MegatronEngine(CheckpointedEngine):
    """Model chunks of this rank, and their optimizer.

    The default process group must be initialised; making an engine is collective.

    Args:
        model_folder: Hugging Face folder to start from.
        device: Device of this rank: its own GPU, or the CPU if there is no CUDA.
        layout: Distribution of the model over the ranks.
        optimizer: Optimizer options; None makes a model without gradients, such as a reference.
        model: Data type, recomputation, kind of layers, what leaves the device while idle, and the
            timeout of the layout's groups.
        pipeline_parts: Micro-batches of a step; by default one per pipeline stage.
        seed: Seed of all random draws.
        load_weights: If False, the weights are undefined until a checkpoint is loaded.

    Raises:
        LayoutRefused: if the ranks or the model do not fit the layout.
        UnsupportedModel: if megatron-core has no model of this configuration.
        IncompatibleWeights: if the folder lacks tensors, or has some that the model does not read.
        DeviceRefused: for the CPU if CUDA is present.
    """

    _absent: Set[str] = frozenset()
    """Tensors that the folder lacks, and whose parameters keep their initial values."""

    def __init__(
        self,
        model_folder: Path,
        *,
        device: torch.device,
        layout: ParallelLayout,
        optimizer: OptimizerOptions | None = None,
        model: ModelOptions = ModelOptions(),  # noqa: B008  # frozen
        pipeline_parts: int | None = None,
        seed: int = 0,
        load_weights: bool = True,
    ) -> None:
        if device.type == "cpu" and torch.cuda.is_available():
            raise DeviceRefused(device.type)
        with together():
            self._description = self._read(model_folder)
        self.config, self.tokenizer = self._description.config, self._description.tokenizer
        self.options = model
        self.device = device
        self.layout = layout
        self.checkpoint_manager = CheckpointManager()
        self.steps = 0
        self._parts = pipeline_parts or layout.pipeline
        self._fused_loss = model.fused_loss
        self._optimizer_options = optimizer
        join(layout, seed, model.timeout)
        self._transformer = transformer_config(self.config, layout, model)
        self._chunks = build_chunks(self.config, self._transformer, model)
        names = mapping(self.config, self._transformer, layout.tensor)
        if load_weights:
            with together():
                load_folder(self._chunks, model_folder, names, absent=self._absent)
        self._names = names
        self._tied = is_tied(self.config)
        self._stream = WeightStream(self._chunks, names, tied=self._tied, device=device)
        if load_weights:
            with together():
                self._stream.check_all_used(model_folder)
        self.module = self._chunks
        self.optimizer: Any = None
        if optimizer is not None:
            self._make_trainable(optimizer, model)
        else:
            for chunk in self._chunks:
                chunk.requires_grad_(requires_grad=False).eval()
        self._memory = OffloadedModel(
            model.offload, self._parameters, self._gradients, self._optimizer_tensors
        )

    def _read(self, folder: Path) -> Description:
        """Return the model's description."""
        return read_description(folder)

    # --- computing -------------------------------------------------------------------------

    @holding(*ALL)
    def train_batch(
        self,
        batch: Batch | Sequence[Batch],
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> tuple[list[Any], float]:
        """Take one optimizer step on this replica's batch. Collective.

        Args:
            batch: Batch of the replica, the same on all its ranks; or its micro-batches, whose
                number is a multiple of the pipeline's stages.
            loss: Loss of each micro-batch. The sum is differentiated, and the replicas' gradients
                are averaged.
            temperature: Divisor of the logits.
            entropy: Give entropies to the loss too.

        Returns:
            The loss function's second results, one for each micro-batch, on the last pipeline stage
            alone; and the gradients' norm before clipping.
        """
        return self._optimizer_step(
            lambda: accumulate_gradients(
                self.module,
                batch.equal_parts(self._parts) if isinstance(batch, Batch) else batch,
                loss,
                self._statistics(temperature, entropy=entropy),
            )
        )

    def _optimizer_step(self, accumulate: Callable[[], list[Any]]) -> tuple[list[Any], float]:
        """Take a step on gradients that a function accumulates; return its result and their norm.

        The norm is before clipping. If it is not finite, on all ranks alike, the step is skipped:
        parameters, optimizer and schedule stay as they are.
        """
        for chunk in self.module:
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

    def response_logprobs(self, batch: Batch, *, temperature: float = 1.0) -> torch.Tensor | None:
        """Return log-probabilities [B, R] of response tokens, without gradients. Collective.

        They are on the last pipeline stage; the other stages get None.
        """
        parts = batch.equal_parts(self._parts)
        logprobs = self.logprobs_of_parts(parts, temperature=temperature)
        return torch.cat(logprobs)[: len(batch)] if logprobs else None

    @holding("parameters")
    def logprobs_of_parts(
        self, parts: Sequence[Batch], *, temperature: float = 1.0
    ) -> list[torch.Tensor]:
        """Return log-probabilities as :meth:`response_logprobs`, of each micro-batch.

        The number of micro-batches is a multiple of the pipeline's stages. Other stages than the
        last get an empty list.
        """
        return response_logprobs(self.module, parts, self._statistics(temperature))

    def _statistics(self, temperature: float, *, entropy: bool = False) -> Statistics:
        return Statistics(self.config.vocab_size, temperature, entropy, self._fused_loss)

    @holding("parameters")
    def logits(self, batch: Batch) -> torch.Tensor | None:
        """Return logits [B, S, vocabulary] of unpadded rows, on the last stage. Collective."""
        parts = batch.equal_parts(self._parts)
        logits = whole_logits(self.module, parts, vocabulary=self.config.vocab_size)
        return torch.cat(logits)[: len(batch)] if logits else None

    # --- weights ---------------------------------------------------------------------------

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

    # --- checkpoints -----------------------------------------------------------------------

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

        Raises:
            CheckpointRefused: if the optimizer's state would not load again.
        """
        needed: tuple[Part, ...] = ("parameters", "optimizer")
        copy = copy or not all(map(self._memory.is_resident, needed))
        with self.resident(*needed):
            return self._prepared(Path(local_path), group=group, copy=copy)

    def _prepared(
        self, folder: Path, *, group: dist.ProcessGroup | None, copy: bool
    ) -> dict[str, PlannedSave]:
        contents = set(self.checkpoint_manager.checkpoint_save_contents)
        if "optimizer" in contents and not self._optimizer_loads:
            raise OptimizerNotLoadable()
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
        self._check_optimizer_loads(folder)
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

    # --- its parts -------------------------------------------------------------------------

    def _make_trainable(self, options: OptimizerOptions, model: ModelOptions) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        bf16 = model.dtype is torch.bfloat16
        with adapted():
            chunks = [
                Float16Module(self._transformer, chunk) if bf16 else chunk for chunk in self._chunks
            ]
            self.module = [
                DistributedDataParallel(
                    config=self._transformer,
                    ddp_config=DistributedDataParallelConfig(
                        grad_reduce_in_fp32=True, use_distributed_optimizer=options.distributed
                    ),
                    module=chunk,
                    disable_bucketing=index > 0,
                )
                for index, chunk in enumerate(chunks)
            ]
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=as_learning_rate(options.learning_rate).highest,
                    adam_beta1=options.adamw.beta1,
                    adam_beta2=options.adamw.beta2,
                    adam_eps=options.adamw.epsilon,
                    weight_decay=options.adamw.weight_decay,
                    clip_grad=options.adamw.max_grad_norm,
                    bf16=bf16,
                    params_dtype=model.dtype,
                    use_distributed_optimizer=options.distributed,
                ),
                self.module,
            )
        self._transformer.finalize_model_grads_func = finalize_model_grads
        self._transformer.grad_scale_func = self.optimizer.scale_loss

    def _parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for chunk in self._chunks for parameter in chunk.parameters())

    def _gradients(self) -> Iterator[torch.Tensor]:
        if self.optimizer is None:
            return
        self.optimizer.zero_grad()
        for chunk in self.module:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                yield buffer.grad_data

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        for optimizer in getattr(self.optimizer, "chained_optimizers", ()):
            yield from optimizer_tensors(optimizer.optimizer)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next optimizer step."""
        assert self._optimizer_options is not None
        return as_learning_rate(self._optimizer_options.learning_rate).at(self.steps)

    def _set_learning_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate

    def _keyed_chunks(self) -> list[tuple[str, Any]]:
        return [(f"model{index}", chunk) for index, chunk in enumerate(self._chunks)]

    def _model_state(self) -> dict[str, Any]:
        with adapted():
            return {key: chunk.sharded_state_dict() for key, chunk in self._keyed_chunks()}

    def _training_state(self, contents: set[str], *, is_loading: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"steps": self.steps, _HAS_RANDOM_STATES: "extra" in contents}
        if "optimizer" in contents and self.optimizer is not None:
            with adapted():
                state["optimizer"] = self.optimizer.sharded_state_dict(
                    self._model_state(), is_loading=is_loading, metadata=_OPTIMIZER_FORMAT
                )
        return state

    @property
    def _optimizer_loads(self) -> bool:
        options = self._optimizer_options
        if options is None or not options.distributed:
            return True
        return not isinstance(self.optimizer.chained_optimizers[0].optimizer, torch.optim.AdamW)

    def _check_optimizer_loads(self, folder: Path) -> None:
        if (folder / "training").is_dir() and not self._optimizer_loads:
            raise OptimizerNotLoadable(folder / "training")

    def _load_training_state(self, folder: Path) -> None:
        state = self._training_state({"optimizer", "extra"}, is_loading=True)
        loaded = checkpoint.load(state, folder)
        with adapted():
            self.optimizer.load_state_dict(loaded["optimizer"])
        assert self._optimizer_options is not None
        apply_adamw_options(self.optimizer, self._optimizer_options.adamw)
        self.steps = loaded["steps"]
        # Checkpoints of earlier versions lack the key. They were saved with random states, unless
        # `checkpoint_save_contents` left them out.
        if loaded.get(_HAS_RANDOM_STATES, True):
            with together():
                restore_rank_state(folder, self.device, self.layout)
