"""veRL's FSDP engine as it is, behind the interface of this project's engines."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...learning.finite import check_finite_model
from ...learning.policy import load_tokenizer
from ...runtime.collectives import together
from ...storage.huggingface_files import read_user_files
from ..adamw import AdamWOptions, apply_adamw_options
from ..base import NamedTensors, per_tensor_params
from ..learning_rate import LearningRate
from ..sharded import ShardedEngine, reshard, shard_name
from ..state_files import copied, read_state
from .batches import LossOf, loss_function, no_padding, select_response_tokens
from .errors import importing_verl

if TYPE_CHECKING:
    from ...algorithms.batch import Batch

_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}


class VerlOptions(NamedTuple):
    """Settings of veRL's engine."""

    learning_rate: LearningRate
    total_steps: int
    """Optimizer steps of the run."""
    dtype: str = "float32"
    """Data type of computation; parameters that are trained are float32."""
    adamw: AdamWOptions = AdamWOptions()
    recompute: bool = False


class VerlEngine(ShardedEngine):
    """veRL's ``FSDPEngineWithLMHead`` on FSDP2: model, optimizer, schedule, forward and backward.

    The files of a checkpoint are those that veRL's own ``load_checkpoint`` reads. They are written
    by the coordinator, while training continues, and are read back without pickle.

    Args:
        folder: Hugging Face folder of the policy.
        device: Device of this rank.
        options: Settings.

    Raises:
        VerlUnusable: if veRL is not installed.
        NonFiniteWeights: if the folder's weights are not finite.
    """

    def __init__(self, folder: Path, *, device: torch.device, options: VerlOptions) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.user_files = read_user_files(folder)
        self._device = device
        self.verl = _initialized(folder, device, options)
        super().__init__(
            self.verl.module,
            self.verl.optimizer,
            self.verl.lr_scheduler,
            adamw=options.adamw,
            learning_rate=options.learning_rate,
        )
        # veRL's settings have no epsilon: `build_optimizer` of verl/workers/config/optimizer.py.
        apply_adamw_options(self.optimizer, options.adamw)
        with together():
            check_finite_model(self.module, str(folder))
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self.published_dtypes = {name: self._dtype for name, _ in self.module.named_parameters()}

    # --- computation ---------------------------------------------------------------------------

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """Return log-probabilities of response tokens [B, R], without gradient. Collective."""
        with self.verl.eval_mode():
            output = self.verl.infer_batch(no_padding(batch, temperature))
        return select_response_tokens(output["model_output"]["log_probs"], batch)

    def update(
        self, parts: Sequence[Batch], loss_of: LossOf, *, temperature: float, entropy: bool
    ) -> float:
        """Take one optimizer step; return the gradients' norm before the clip. Collective.

        If the norm is not finite, the step is skipped, and the schedule stays as it is.

        Args:
            parts: Micro-batches, as many on every rank.
            loss_of: Returns the loss of a micro-batch. What it raises must be raised on all ranks.
            temperature: Temperature that sampled.
            entropy: Compute entropies too.
        """
        with self.verl.train_mode():
            self.verl.optimizer_zero_grad()
            for part in parts:
                data = no_padding(part, temperature, calculate_entropy=entropy)
                self.verl.forward_backward_batch(data, loss_function(loss_of, part))
            norm = float(self.verl.optimizer_step())
            # It takes no step on a norm that is not finite, and returns it: optimizer_step() of
            # verl/workers/engine/fsdp/transformer_impl.py.
            if math.isfinite(norm):
                self.verl.lr_scheduler_step()
        return norm

    # --- weights -------------------------------------------------------------------------------

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what veRL's engine gives, in the dtype of the model. Collective.

        A tied tensor appears once, under its first name.
        """
        every = dict(self.module.named_parameters(remove_duplicate=False))
        tied = every.keys() - dict(self.module.named_parameters()).keys()
        for name, tensor in per_tensor_params(self.verl):
            if name not in tied:
                yield name, tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def master_params(self) -> NamedTensors:
        """Yield full parameters in the dtype of the optimizer. Collective."""
        reshard(self.module)  # as in FSDPEngine
        for name, parameter in self.module.named_parameters():
            value = parameter.detach()
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    # --- checkpoints ---------------------------------------------------------------------------

    def training_files(self, folder: Path) -> dict[Path, dict[str, Any]]:
        """Return the content of veRL's two files of this rank's training state."""
        extra = {"lr_scheduler": self.scheduler.state_dict(), "rng": self._random_states()}
        return {
            folder / shard_name("optim"): copied(self.optimizer.state_dict()),
            folder / shard_name("extra_state"): extra,
        }

    def _read_shards(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        model = self._read_model(folder, dist.get_world_size())
        optimizer, extra = (
            read_state(folder / shard_name(part)) for part in ("optim", "extra_state")
        )
        scheduler, states = extra["lr_scheduler"], extra["rng"]
        return model, {"optimizer": optimizer, "scheduler": scheduler, "random": states}

    def _set_random_states(self, states: dict[str, Any]) -> None:
        self.verl.checkpoint_manager.load_rng_state(states)

    def _random_states(self) -> dict[str, Any]:
        """Return what veRL restores, with plain values, which are read without pickle."""
        name, words, *rest = np.random.get_state()
        states: dict[str, Any] = {
            "cpu": torch.get_rng_state(),
            "numpy": (name, [int(word) for word in words], *rest),
            "random": random.getstate(),
        }
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states


def _initialized(folder: Path, device: torch.device, options: VerlOptions) -> Any:
    """Return veRL's engine with its model loaded. Collective."""
    if device.type == "cpu":  # veRL knows accelerators alone: the variable names a platform
        os.environ.setdefault("VERL_PLATFORM", "cpu")
        os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "trinity_workers.verl.cpu_platform")
    with importing_verl("verl"):
        engine = _new_engine(folder, options)
        engine.initialize()
    return engine


def _new_engine(folder: Path, options: VerlOptions) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    precision = {
        "param_dtype": _PRECISIONS[options.dtype],
        "reduce_dtype": "fp32",
        "buffer_dtype": "fp32",
    }
    rate = options.learning_rate
    return FSDPEngineWithLMHead(
        HFModelConfig(
            path=str(folder),
            use_remove_padding=False,
            enable_gradient_checkpointing=options.recompute,
            override_config={"attn_implementation": "sdpa"},
        ),
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=precision),
        FSDPOptimizerConfig(
            lr=rate.highest,
            weight_decay=options.adamw.weight_decay,
            betas=options.adamw.betas,
            clip_grad=options.adamw.max_grad_norm,
            lr_warmup_steps=rate.warmup_steps,
            lr_scheduler_type=rate.schedule,
            total_training_steps=options.total_steps,
        ),
        CheckpointConfig(),
    )
