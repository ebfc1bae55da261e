"""Engine with a Hugging Face model on megatron-core, on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from trinity_events.errors import TrinityError

from ...algorithms.batch import Batch
from ...runtime.collectives import together
from ..learning_rate import as_learning_rate
from ..model_memory import ALL, OffloadedModel, holding, optimizer_tensors
from .base import MegatronModel, OptimizerOptions
from .cpu import adapted
from .distributed_optimizer import make_resumable
from .layout import ParallelLayout, join
from .model import ModelOptions, build_chunks, transformer_config
from .model_description import Description, read_description
from .stream import load_folder
from .training import (
    LossFunction,
    Statistics,
    accumulate_gradients,
    response_logprobs,
    whole_logits,
)


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


class MegatronEngine(MegatronModel):
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
            # A folder may be missing on one host alone, and joining the layout is collective.
            description = self._read(model_folder)
        self._parts = pipeline_parts or layout.pipeline
        self._fused_loss = model.fused_loss
        # Before the model, whose layers look up their groups as they are made.
        join(layout, seed, model.timeout)
        transformer = transformer_config(description.config, layout, model)
        super().__init__(
            description,
            build_chunks(description.config, transformer, model),
            transformer=transformer,
            device=device,
            layout=layout,
            options=model,
            optimizer=optimizer,
        )
        if load_weights:
            with together():
                load_folder(self._chunks, model_folder, self._names, absent=self._absent)
                self._stream.check_all_used(model_folder)
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
                    # bfloat16 would lose small gradients in the sum over micro-batches and
                    # replicas.
                    ddp_config=DistributedDataParallelConfig(
                        grad_reduce_in_fp32=True, use_distributed_optimizer=options.distributed
                    ),
                    module=chunk,
                    # As Megatron-LM's training.py: reductions of later chunks overlap with
                    # computing anyway.
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
            make_resumable(self.optimizer)
        # The schedule calls it after the last micro-batch. It reduces over replicas, and between
        # the first and the last stage, which both have a tied embedding.
        self._transformer.finalize_model_grads_func = finalize_model_grads
        # The schedule applies it to each loss; without float16 it multiplies by 1.
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
