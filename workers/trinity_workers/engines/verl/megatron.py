"""veRL's Megatron engine as it is, behind the interface of this project's Megatron engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from packaging.version import Version
from torch import Tensor

from ...algorithms.batch import Batch, concatenate
from ...algorithms.logits import TokenStatistics
from ...learning.finite import check_finite_model
from ...runtime.collectives import together
from ..base import per_tensor_params
from ..learning_rate import as_learning_rate
from ..megatron.base import MegatronModel, OptimizerOptions
from ..megatron.distributed_optimizer import make_resumable
from ..megatron.layout import ParallelLayout, has_transformer_engine, join
from ..megatron.model import ModelOptions, check_model, has_experts
from ..megatron.model_description import Description, read_description
from ..megatron.training import LossFunction
from .batches import loss_function, no_padding, select_response_tokens
from .errors import VerlMegatronRefused, importing_verl

_FIRST_RELEASE = Version("0.9.1")
"""Oldest release of veRL whose engine the tests drive."""


class VerlMegatronEngine(MegatronModel):
    """veRL's ``MegatronEngineWithLMHead``: model, forward and backward, optimizer and weights.

    mbridge builds the model. Learning rates, checkpoints and shards are this project's, so that a
    checkpoint is written while training continues, is read without pickle, and at any layout.

    The default process group must be initialised; making an engine is collective.

    Args:
        folder: Hugging Face folder of the policy.
        device: GPU of this rank.
        layout: Distribution of the model over the ranks.
        optimizer: Optimizer options; its state is always distributed over replicas.
        model: Recomputation, and the timeout of the layout's groups. veRL computes in bfloat16.
        seed: Seed of all random draws.

    Raises:
        VerlUnusable: if veRL, mbridge or megatron-core is not installed.
        VerlMegatronRefused: if veRL's engine cannot run here, or mbridge would build another model.
        LayoutRefused: if the ranks or the model do not fit the layout.
        UnsupportedModel: if it is of another type than this project's engine trains.
        UnusedTensors: if the model has no place for a tensor of the folder.
        NonFiniteWeights: if the folder's weights are not finite.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device,
        layout: ParallelLayout,
        optimizer: OptimizerOptions,
        model: ModelOptions,
        seed: int = 0,
    ) -> None:
        check_device(device)
        with together():
            description = read_description(folder)
            _check_model(description, folder, layout)
        join(layout, seed, model.timeout)
        with importing_verl("verl-megatron"):
            self.verl = _new_engine(folder, layout, optimizer, model, seed)
            self.verl.initialize()
        super().__init__(
            description,
            [_unwrapped(chunk) for chunk in self.verl.module],
            transformer=self.verl.tf_config,
            device=device,
            layout=layout,
            options=model,
            optimizer=structs.replace(optimizer, distributed=True),  # veRL gives no weights without
        )
        self.module, self.optimizer = self.verl.module, self.verl.optimizer
        make_resumable(self.optimizer)
        with together():
            self._stream.check_all_used(folder)
            for chunk in self._chunks:
                check_finite_model(chunk, str(folder))

    # --- computation ---------------------------------------------------------------------------

    def train_batch(
        self,
        parts: Sequence[Batch],
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> tuple[list[Any], float]:
        """Take one optimizer step on micro-batches, as ``MegatronEngine.train_batch``."""
        metrics: dict[int, Any] = {}
        rows = _equal_rows(parts)

        def loss_of(part: Batch, current: TokenStatistics) -> Tensor:
            value, metrics[len(metrics)] = loss(current, part)
            return value

        def accumulate() -> list[Any]:
            # One call: each ends with the reduction of all gradients over replicas.
            data = no_padding(
                concatenate(rows), temperature, rows=len(rows[0]), calculate_entropy=entropy
            )
            self.verl.forward_backward_batch(data, loss_function(loss_of, *rows))
            return list(metrics.values())

        with self.verl.train_mode():
            return self._optimizer_step(accumulate)

    def logprobs_of_parts(
        self, parts: Sequence[Batch], *, temperature: float = 1.0
    ) -> list[Tensor]:
        """Return log-probabilities [B, R] of each micro-batch, without gradients. Collective.

        Other pipeline stages than the last get an empty list.
        """
        rows = _equal_rows(parts)
        whole = concatenate(rows)
        with self.verl.eval_mode():
            output = self.verl.infer_batch(no_padding(whole, temperature, rows=len(rows[0])))
        if not output:
            return []
        logprobs = select_response_tokens(output["model_output"]["log_probs"], whole)
        every = logprobs.reshape(len(parts), len(rows[0]), -1)  # (micro-batches, rows, responses)
        return [
            own[: len(part), : part.response_width] for own, part in zip(every, parts, strict=True)
        ]

    # --- weights and checkpoints ---------------------------------------------------------------

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors as mbridge gives them, by Hugging Face name. Collective.

        A tied tensor appears once, under its first name.
        """
        yield from per_tensor_params(self.verl)

    def _apply_options(self) -> None:
        super()._apply_options()
        # veRL's schedule, which takes no step, leaves norms and biases without weight decay.
        self.verl.lr_scheduler.step(0)


def check_device(device: torch.device) -> None:
    """Raise VerlMegatronRefused unless veRL's Megatron engine can run on a rank's device."""
    if device.type != "cuda":
        raise VerlMegatronRefused("device", device.type.upper())
    if not has_transformer_engine():
        raise VerlMegatronRefused("layers")


def _check_model(description: Description, folder: Path, layout: ParallelLayout) -> None:
    """Raise an error for a model that mbridge builds otherwise than this project's engine."""
    from transformers import AutoConfig

    config = description.config
    check_model(config, layout)
    if has_experts(config):
        raise VerlMegatronRefused("experts", str(config.model_type))
    if (rotary := config.rope_parameters["rope_type"]) != "default":
        raise VerlMegatronRefused("rotary", rotary)
    if config.vocab_size % layout.tensor:
        raise VerlMegatronRefused("vocabulary", str(config.vocab_size), layout.tensor)
    written = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if written.tie_word_embeddings != config.tie_word_embeddings:
        raise VerlMegatronRefused("head")


def _new_engine(
    folder: Path,
    layout: ParallelLayout,
    optimizer: OptimizerOptions,
    model: ModelOptions,
    seed: int,
) -> Any:
    """Return veRL's engine as its worker makes it, not yet initialised."""
    if Version(installed := version("verl")) < _FIRST_RELEASE:
        raise VerlMegatronRefused("release", installed)
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    transformer: dict[str, Any] = {"sequence_parallel": False}
    if model.recompute:
        transformer |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    adamw = optimizer.adamw
    return MegatronEngineWithLMHead(
        HFModelConfig(path=str(folder), use_remove_padding=False),
        McoreEngineConfig(
            vanilla_mbridge=True,
            use_remove_padding=False,
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            sequence_parallel=False,
            seed=seed,
            override_transformer_config=transformer,
        ),
        McoreOptimizerConfig(
            lr=as_learning_rate(optimizer.learning_rate).highest,
            weight_decay=adamw.weight_decay,
            clip_grad=adamw.max_grad_norm,
            total_training_steps=1,  # this project sets the rate of each step
            lr_decay_style="constant",
            # veRL's settings have neither.
            override_optimizer_config={
                "adam_beta1": adamw.beta1,
                "adam_beta2": adamw.beta2,
                "adam_eps": adamw.epsilon,
            },
        ),
        CheckpointConfig(),
    )


def _unwrapped(chunk: Any) -> Any:
    from megatron.core.utils import unwrap_model

    return unwrap_model(chunk)


def _equal_rows(parts: Sequence[Batch]) -> list[Batch]:
    """Return the micro-batches with padding rows, since veRL's have equally many rows."""
    rows = max(map(len, parts))
    return [part.padded(rows) for part in parts]
