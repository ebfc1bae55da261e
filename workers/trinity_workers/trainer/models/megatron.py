"""Models of a training step on Megatron, as the configuration asks for them."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch

from ...config.sections.trainer import TrainerConfig
from ...config.train_config import RunConfig
from ...engines.learning_rate import LearningRate
from ...engines.megatron import (
    LayoutRefused,
    MegatronCritic,
    MegatronEngine,
    MegatronRewardModel,
    ModelOptions,
    OptimizerOptions,
    ParallelLayout,
)
from ...engines.megatron.model import has_experts
from ...engines.megatron.model_description import read_description
from ...engines.offload import FrozenOffload, Offload
from ...learning.reward_model import RewardModel
from ...learning.teacher import checked_teacher
from ..step.base import ModelName, Models, needed_models
from ..step.megatron import MegatronTrainingStep
from .rates import critic_rate, get_adamw_options, policy_rate
from .reward_tokens import reward_tokens


def load_models(
    config: RunConfig, device: torch.device, names: Collection[ModelName] | None = None
) -> Models:
    """Load models. Collective.

    All of them have one layout.

    Args:
        config: The run.
        device: Device of this rank.
        names: Models to load; by default those that a training step needs.

    Raises:
        BadPolicy: if the teacher has other tokens than the policy, or there is no reward model.
        LayoutRefused: if the ranks or a model do not fit the layout.
    """
    names = needed_models(config) if names is None else names
    trainer, folder = config.trainer, config.model_folder
    common: dict[str, Any] = {
        "device": device,
        "layout": parallel_layout(trainer),
        "seed": config.seed,
    }

    policy = critic = None
    if "policy" in names or "rollout" in names:
        # Before the engine joins a layout, which is that of all models of the process.
        _check_experts(config)
        policy = MegatronEngine(
            folder,
            optimizer=(
                optimizer_options(trainer, policy_rate(config)) if "policy" in names else None
            ),
            model=model_options(config, trainer.policy_offload),
            **common,
        )
    if "critic" in names:
        critic = MegatronCritic(
            folder,
            optimizer=optimizer_options(trainer, critic_rate(config)),
            model=model_options(config, trainer.critic_offload),
            **common,
        )
    # From here on frozen models, which are offloaded by the settings of the reference.
    common["model"] = model_options(config, trainer.reference_offload)
    reference = MegatronEngine(folder, **common) if "reference" in names else None
    teacher = judge = None
    if "teacher" in names and (path := config.teacher_folder) is not None:
        teacher = MegatronEngine(checked_teacher(path, folder), **common)
    if "reward_model" in names and (path := config.reward_folder) is not None:
        tokens = reward_tokens(config, path)
        judge = RewardModel(MegatronRewardModel(path, **common), tokens)
    return Models(policy, critic, reference, teacher, judge)


def make_step(
    config: RunConfig, device: torch.device, names: Collection[ModelName] | None = None
) -> MegatronTrainingStep:
    """Load models, as :func:`load_models`, and return the step that computes with them."""
    return MegatronTrainingStep.for_run(config, load_models(config, device, names))


def model_options(config: RunConfig, offload: Offload | FrozenOffload) -> ModelOptions:
    """Return the options of a model of the run."""
    return ModelOptions(
        dtype=getattr(torch, config.model.dtype),
        fused_loss=config.trainer.fused_loss,
        recompute=config.trainer.recompute,
        offload=offload,
        # As every wait of the run: a rank that died ends the collectives of the others within it.
        timeout=timedelta(seconds=config.sync.timeout),
    )


def optimizer_options(trainer: TrainerConfig, rate: LearningRate) -> OptimizerOptions:
    """Return the options of an optimizer with this learning rate."""
    return OptimizerOptions(
        learning_rate=rate,
        adamw=get_adamw_options(trainer),
        distributed=trainer.distributed_optimizer,
    )


def _check_experts(config: RunConfig) -> None:
    """Raise LayoutRefused if the layout spreads experts that the policy does not have."""
    ranks = config.trainer.expert_parallel
    if ranks > 1 and not has_experts(read_description(config.model_folder).config):
        raise LayoutRefused("no experts", expert=ranks, folder=config.model_folder)


def parallel_layout(trainer: TrainerConfig) -> ParallelLayout:
    """Return the layout that the configuration names."""
    return ParallelLayout(
        tensor=trainer.tensor_ranks,
        pipeline=trainer.pipeline_parallel,
        virtual=trainer.virtual_pipeline,
        expert=trainer.expert_parallel,
        context=trainer.context_parallel,
        sequence_parallel=trainer.sequence_parallel,
    )
