"""Models of a training step on Megatron, as the configuration asks for them."""

from __future__ import annotations

from typing import Any

import torch

from ..config import RunConfig
from ..engines import LearningRate
from ..engines.megatron import (
    MegatronCritic,
    MegatronEngine,
    MegatronRewardModel,
    ModelOptions,
    OptimizerOptions,
    ParallelLayout,
)
from ..learning.policy import load_tokenizer
from ..learning.reward_model import RewardModel, RewardTokens, reward_tokenizer
from ..learning.teacher import checked_teacher
from .rates import critic_rate, policy_rate
from .training_step import Models


def load_models(config: RunConfig, device: torch.device) -> Models:
    """Load the policy, and the models that the algorithm needs beside it. Collective.

    All of them have one layout.

    Raises:
        BadPolicy: if the teacher has other tokens than the policy, or there is no reward model.
        LayoutRefused: if the ranks or a model do not fit the layout.
    """
    trainer, folder = config.trainer, config.model_folder
    pipeline = trainer.pipeline_parallel
    tensor = trainer.tensor_parallel or max(1, trainer.ranks // pipeline)
    common: dict[str, Any] = {
        "device": device,
        "layout": ParallelLayout(tensor=tensor, pipeline=pipeline),
        "model": ModelOptions(dtype=getattr(torch, config.model.dtype)),
        "seed": config.seed,
    }

    def optimizer(rate: LearningRate) -> OptimizerOptions:
        return OptimizerOptions(learning_rate=rate, gradient_norm=trainer.gradient_norm)

    policy = MegatronEngine(folder, optimizer=optimizer(policy_rate(config)), **common)
    critic = None
    if config.algorithm.critic.use:
        critic = MegatronCritic(folder, optimizer=optimizer(critic_rate(config)), **common)
    asks_reference = "reference_logprobs" in config.algorithm_of_step.needed_fields
    reference = MegatronEngine(folder, **common) if asks_reference else None
    path = config.teacher_folder
    teacher = None
    if path is not None:
        teacher = MegatronEngine(checked_teacher(path, folder), **common)
    judge = None
    if (path := config.reward_folder) is not None:
        tokens = RewardTokens(load_tokenizer(folder), reward_tokenizer(path))
        judge = RewardModel(MegatronRewardModel(path, **common), tokens)
    return Models(policy, critic, reference, teacher, judge)
