"""Training step whose policy is veRL's Megatron engine."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ...config.train_config import RunConfig
from ...engines.verl.megatron import VerlMegatronEngine
from ..step.base import ModelName, needed_models
from ..step.megatron import MegatronTrainingStep
from .megatron import load_models, model_options, optimizer_options, parallel_layout
from .rates import policy_rate


def make_step(
    config: RunConfig, device: torch.device, names: Collection[ModelName] | None = None
) -> MegatronTrainingStep:
    """Load models, as :func:`.megatron.load_models`, with the policy on veRL's engine.

    Critic, reference, teacher and reward model are this project's, in the same layout.
    """
    names = needed_models(config) if names is None else names
    trainer, policy = config.trainer, None
    if "policy" in names:
        policy = VerlMegatronEngine(
            config.model_folder,
            device=device,
            layout=parallel_layout(trainer),
            optimizer=optimizer_options(trainer, policy_rate(config)),
            model=model_options(config, trainer.policy_offload),
            seed=config.seed,
        )
    models = load_models(config, device, [name for name in names if name != "policy"])
    return MegatronTrainingStep.for_run(
        config, models if policy is None else models._replace(policy=policy)
    )
