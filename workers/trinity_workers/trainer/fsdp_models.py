"""Models of a training step on FSDP, as the configuration asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..config import RunConfig
from ..engines import FSDPEngine
from ..engines.fsdp import frozen_policy
from ..learning.reward_model import RewardModel, RewardTokens, load_reward_model, reward_tokenizer
from ..learning.teacher import checked_teacher
from ..learning.values import load_critic
from .rates import critic_rate, policy_rate
from .training_step import Models


def load_models(config: RunConfig, device: torch.device) -> Models:
    """Load the policy, and the models that the algorithm needs beside it. Collective.

    Raises:
        BadPolicy: if a folder holds no policy or no reward model, or the teacher has other tokens
            than the policy.
    """
    settings = config.algorithm
    common: dict[str, Any] = {
        "device": device,
        "dtype": config.model.dtype,
        "gradient_norm": config.trainer.gradient_norm,
    }
    folder = config.model_folder
    policy = FSDPEngine(folder, learning_rate=policy_rate(config), **common)
    critic = None
    if settings.critic.use:
        critic = FSDPEngine(folder, learning_rate=critic_rate(config), load=load_critic, **common)

    def frozen(path: Path) -> Any:
        return frozen_policy(path, device=device, dtype=config.model.dtype)

    reference = frozen(folder) if "reference_logprobs" in settings.needed_fields else None
    path = config.teacher_folder
    teacher = None if path is None else frozen(checked_teacher(path, folder))
    judge = None
    if (path := config.reward_folder) is not None:
        tokens = RewardTokens(policy.tokenizer, reward_tokenizer(path))
        model = frozen_policy(path, device=device, dtype=config.model.dtype, load=load_reward_model)
        judge = RewardModel(model, tokens)
    return Models(policy, critic, reference, teacher, judge)
