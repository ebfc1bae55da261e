"""Models of a training step on FSDP, as the configuration asks for them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from ...config.train_config import RunConfig
from ...engines.fsdp import FSDPEngine, frozen_policy
from ...engines.fsdp_context import ContextRanks
from ...engines.fsdp_options import FSDPOptions
from ...engines.fsdp_tensor import TensorRanks
from ...engines.model_memory import Part
from ...learning.adapters import policy_loader
from ...learning.reward_model import RewardModel, load_reward_model
from ...learning.teacher import checked_teacher
from ...learning.values import load_critic
from ..step.base import ModelName, Models, needed_models
from ..step.fsdp import FSDPTrainingStep
from .rates import critic_rate, get_adamw_options, policy_rate
from .reward_tokens import reward_tokens


def load_models(
    config: RunConfig,
    device: torch.device,
    names: Collection[ModelName] | None = None,
    *,
    options: FSDPOptions | None = None,
) -> Models:
    """Load models. Collective.

    Args:
        config: The run.
        device: Device of this rank.
        names: Models to load; by default those that a training step needs.
        options: Options of each; by default those that the configuration names.

    Raises:
        BadPolicy: if a folder holds no policy or no reward model, or the teacher has other tokens
            than the policy.
    """
    names = needed_models(config) if names is None else names
    common: dict[str, Any] = {
        "device": device,
        "dtype": config.model.dtype,
        "options": options or fsdp_options(config, device),
    }
    folder = config.model_folder
    trainer = config.trainer
    trained = common | {"adamw": get_adamw_options(trainer)}
    policy = critic = reference = None
    if "policy" in names or "rollout" in names:
        lora = config.model.lora
        policy = FSDPEngine(
            folder,
            # A policy that only answers has no optimizer.
            learning_rate=policy_rate(config) if "policy" in names else None,
            load=policy_loader(lora, config.seed) if lora.rank else None,
            offload=trainer.policy_offload,
            **trained,
        )
    if "critic" in names:
        critic = FSDPEngine(
            folder,
            learning_rate=critic_rate(config),
            load=load_critic,
            offload=trainer.critic_offload,
            **trained,
        )

    def frozen(path: Path, **options: Any) -> Any:
        return frozen_policy(path, offload=trainer.reference_offload, **common, **options)

    if "reference" in names:
        if policy is not None and policy.adapters is not None:
            # Base weights of adapters never change, so the reference costs no second model.
            reference = AdaptedBase(policy)
        else:
            reference = frozen(folder)
    teacher = judge = None
    if "teacher" in names and (path := config.teacher_folder) is not None:
        teacher = frozen(checked_teacher(path, folder))
    if "reward_model" in names and (path := config.reward_folder) is not None:
        tokens = reward_tokens(config, path)
        judge = RewardModel(frozen(path, load=load_reward_model), tokens)
    return Models(policy, critic, reference, teacher, judge)


class AdaptedBase:
    """Base of an engine's adapters, as a frozen model: the reference, without memory of its own.

    Args:
        engine: Engine of a policy with adapters.
    """

    def __init__(self, engine: FSDPEngine) -> None:
        self._engine = engine

    def resident(self, *parts: Part) -> AbstractContextManager[None]:
        """Return a block in which the policy's parameters are on the device."""
        return self._engine.resident(*parts)

    def get_output_embeddings(self) -> Any:
        """Return the output head, which has no adapter."""
        return self._engine.module.get_output_embeddings()

    def __call__(self, **inputs: Any) -> Any:
        """Compute as the model does without its adapters, and without gradients. Collective."""
        # The adapters are parts of the one module that both share.
        with self._engine.without_adapters():
            return self._engine.module(**inputs)


def make_step(
    config: RunConfig, device: torch.device, names: Collection[ModelName] | None = None
) -> FSDPTrainingStep:
    """Load models, as :func:`load_models`, and return the step that computes with them."""
    options = fsdp_options(config, device)
    return FSDPTrainingStep.for_run(
        config,
        load_models(config, device, names, options=options),
        fused=config.trainer.fused_loss,
        context=options.context,
        tensor=options.tensor,
    )


def fsdp_options(config: RunConfig, device: torch.device) -> FSDPOptions:
    """Return the options of the models on FSDP, as the configuration names them. Collective."""
    trainer = config.trainer
    return FSDPOptions(
        recompute=trainer.recompute,
        cpu_offload=trainer.cpu_offload,
        packing=trainer.packing,
        context=ContextRanks.of(trainer.context_parallel, device),
        tensor=TensorRanks.of(trainer.tensor_ranks, device),
    )
