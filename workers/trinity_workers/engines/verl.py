"""veRL's FSDP engine as it is, behind the interface of this project's engines."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trinity_events.checkpoints.layout import MODEL_FOLDER
from trinity_events.checkpoints.verification import VerifyMode
from trinity_events.errors import TrinityError

from ..algorithms.logits import TokenStatistics
from ..learning.finite import (
    check_finite,
    check_finite_model,
    nested_tensors,
    with_backward_gradient,
)
from ..learning.policy import load_tokenizer
from ..runtime.collectives import together
from ..storage.huggingface_files import read_user_files
from ..storage.verification import verify_together, write_manifest_together
from .adamw import AdamWOptions, apply_adamw_options
from .base import (
    NamedTensors,
    per_tensor_params,
    refuse_load_arguments,
    refuse_save_arguments,
)
from .buffers import all_buffer_names
from .fsdp import reshard, shard_name, write_description
from .learning_rate import LearningRate, apply_learning_rate
from .model_folder import FolderReader, has_weights
from .reshard import model_from_folder
from .state_files import copied, read_state, write_state
from .weight_changes import WeightChanges

if TYPE_CHECKING:
    from tensordict import TensorDict

    from ..algorithms.batch import Batch

LossOf: TypeAlias = Callable[["Batch", TokenStatistics], Tensor]
"""Returns a micro-batch's loss to differentiate, from log-probabilities and entropies [B, R]."""

_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}


class VerlUnusable(TrinityError):
    """Raised if veRL's engine cannot run here, or cannot do what a run asks for."""


class VerlOptions(NamedTuple):
    """Settings of veRL's engine."""

    learning_rate: LearningRate
    total_steps: int
    """Optimizer steps of the run."""
    dtype: str = "float32"
    """Data type of computation; parameters that are trained are float32."""
    adamw: AdamWOptions = AdamWOptions()
    recompute: bool = False


class VerlEngine:
    """veRL's ``FSDPEngineWithLMHead`` on FSDP2: model, optimizer, schedule, forward and backward.

    The files of a checkpoint are those that veRL's own ``load_checkpoint`` reads. They are written
    by the coordinator, beside training, and are read back without pickle.

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
        self.options = options
        self._device = device
        self.verl = _initialized(folder, device, options)
        # veRL's settings have no epsilon: `build_optimizer` of verl/workers/config/optimizer.py.
        apply_adamw_options(self.verl.optimizer, options.adamw)
        with together():
            check_finite_model(self.module, str(folder))
        dtype: torch.dtype = getattr(torch, options.dtype)
        self.published_dtypes = {name: dtype for name, _ in self.module.named_parameters()}
        self.weight_changes = WeightChanges(self.module, self.verl.optimizer)
        self.verify_mode: VerifyMode = "full"
        """Extent to which :meth:`load_checkpoint` verifies files before it reads them."""

    @property
    def module(self) -> Any:
        """Sharded model."""
        return self.verl.module

    @property
    def steps(self) -> int:
        """Optimizer steps taken."""
        return int(self.verl.lr_scheduler.last_epoch)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next optimizer step."""
        return float(self.verl.lr_scheduler.get_last_lr()[0])

    # --- computation ---------------------------------------------------------------------------

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """Return log-probabilities of response tokens [B, R], without gradient. Collective."""
        with self.verl.eval_mode():
            output = self.verl.infer_batch(_no_padding(batch, temperature))
        return _select_response_tokens(output["model_output"]["log_probs"], batch)

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
                data = _no_padding(part, temperature, calculate_entropy=entropy)
                self.verl.forward_backward_batch(data, _loss_function(loss_of, part))
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
        dtype = getattr(torch, self.options.dtype)
        every = dict(self.module.named_parameters(remove_duplicate=False))
        tied = every.keys() - dict(self.module.named_parameters()).keys()
        for name, tensor in per_tensor_params(self.verl):
            if name not in tied:
                yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    def master_params(self) -> NamedTensors:
        """Yield full parameters in the dtype of the optimizer. Collective."""
        reshard(self.module)  # as in FSDPEngine
        for name, parameter in self.module.named_parameters():
            value = parameter.detach()
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    # --- checkpoints ---------------------------------------------------------------------------

    def training_files(self, folder: Path) -> dict[Path, dict[str, Any]]:
        """Return the content of this rank's files of optimizer, schedule and random states."""
        extra = {"lr_scheduler": self.verl.lr_scheduler.state_dict(), "rng": self._random_states()}
        return {
            folder / shard_name("optim"): copied(self.verl.optimizer.state_dict()),
            folder / shard_name("extra_state"): extra,
        }

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write model and training state below ``local_path``; durable on return. Collective.

        ``global_step`` has no effect.

        Raises:
            ArgumentRefused: for ``hdfs_path`` and ``max_ckpt_to_keep``.
        """
        refuse_save_arguments(self, hdfs_path, max_ckpt_to_keep)
        folder = Path(local_path)
        with together():
            model, buffers = copied(self.module.state_dict()), all_buffer_names(self.module)
            write_state(folder / shard_name("model"), model, exempt=buffers)
            for path, state in self.training_files(folder).items():
                write_state(path, state)
            if self.verl.rank == 0:
                write_description(folder, self)
        write_manifest_together(folder)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load files of :meth:`save_checkpoint`, at the same number of ranks. Collective.

        The model may also be a Hugging Face folder with weights.

        Raises:
            ArgumentRefused: for ``hdfs_path`` and ``del_local_after_load``.
            CheckpointDamaged: if a file is not as it was saved; nothing is read then.
            FileNotFoundError: if a shard is missing.
            NonFiniteWeights: if parameters or optimizer state are not finite.
            PeerFailed: if another rank could not read its shard; nothing is loaded then.
        """
        refuse_load_arguments(self, hdfs_path, del_local_after_load)
        folder = Path(local_path)
        verify_together(folder, self.verify_mode)
        with together():
            model = self._read_model(folder)
            optimizer, extra = map(read_state, self.training_paths(folder))
            check_finite(nested_tensors(model), str(folder), exempt=all_buffer_names(self.module))
            check_finite(nested_tensors(optimizer), f"the optimizer's state in {folder}")
        self.module.load_state_dict(model)
        self.verl.optimizer.load_state_dict(optimizer)
        apply_adamw_options(self.verl.optimizer, self.options.adamw)
        self.verl.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        apply_learning_rate(self.verl.lr_scheduler, self.options.learning_rate.highest)
        self.verl.checkpoint_manager.load_rng_state(extra["rng"])

    def training_paths(self, folder: Path) -> list[Path]:
        """Return the files of :meth:`training_files`."""
        return [folder / shard_name("optim"), folder / shard_name("extra_state")]

    def _read_model(self, folder: Path) -> dict[str, Any]:
        shard, whole = folder / shard_name("model"), folder / MODEL_FOLDER[-1]
        if not shard.is_file() and has_weights(whole):
            return model_from_folder(FolderReader(whole), self.module)
        return read_state(shard)

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
    if device.type == "cpu":  # veRL knows accelerators alone: it is told of a platform
        os.environ.setdefault("VERL_PLATFORM", "cpu")
        os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "trinity_workers.verl.cpu_platform")
    try:
        engine = _new_engine(folder, options)
        engine.initialize()
    except ModuleNotFoundError as error:
        raise VerlUnusable(
            f"trainer.engine verl needs veRL 0.8 or newer, and there is no module {error.name}: "
            "install trinity-events[verl], then verl with --no-deps"
        ) from error
    except ImportError as error:  # such as of a class that the installed TRL does not have
        raise VerlUnusable(f"veRL's engine does not go with what is installed: {error}") from error
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


def _no_padding(batch: Batch, temperature: float, **settings: Any) -> TensorDict:
    """Return a batch in veRL's layout without padding, as one micro-batch."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    attended = batch.attention_mask.bool()
    offsets = torch.nn.functional.pad(attended.sum(dim=-1).cumsum(dim=0), (1, 0))

    def packed(tensor: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(tensor[attended], offsets)

    data = TensorDict(
        {
            "input_ids": packed(batch.input_ids),
            "position_ids": packed(batch.position_ids),
            "loss_mask": batch.response_mask.long(),
        },
        batch_size=[len(batch)],
    )
    settings |= {
        "temperature": temperature,
        "use_remove_padding": False,
        "use_fused_kernels": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": len(batch),
    }
    tensordict_utils.assign_non_tensor(data, **settings)
    return data


def _loss_function(loss_of: LossOf, part: Batch) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """Return a loss as veRL's engine calls it."""

    def loss(*, model_output: dict[str, Tensor], **_: Any) -> tuple[Tensor, dict[str, float]]:
        entropy = model_output.get("entropy")
        current = TokenStatistics(
            _select_response_tokens(model_output["log_probs"], part),
            None if entropy is None else _select_response_tokens(entropy, part),
        )
        return with_backward_gradient(loss_of(part, current)), {}

    return loss


def _select_response_tokens(jagged: Tensor, batch: Batch) -> Tensor:
    """Return values of response tokens [B, R] from those of the tokens before them, jagged."""
    values = jagged.values().float()
    attended = batch.attention_mask.bool()
    wide = values.new_zeros(attended.shape).masked_scatter(attended, values)
    return wide[:, batch.prompt_width - 1 : -1].masked_fill(~batch.response_mask, 0.0)
