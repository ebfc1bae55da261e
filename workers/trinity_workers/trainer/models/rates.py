"""Learning rates of a run by optimizer step, and the options of its optimizers."""

from __future__ import annotations

from ...config.sections.trainer import TrainerConfig
from ...config.train_config import RunConfig
from ...engines.adamw import AdamWOptions
from ...engines.learning_rate import LearningRate


def get_adamw_options(trainer: TrainerConfig) -> AdamWOptions:
    """Return the options of the optimizers of policy and critic."""
    return AdamWOptions(
        weight_decay=trainer.weight_decay,
        beta1=trainer.adam_beta1,
        beta2=trainer.adam_beta2,
        epsilon=trainer.adam_epsilon,
        max_grad_norm=trainer.max_grad_norm,
    )


def policy_rate(config: RunConfig) -> LearningRate:
    """Return the policy's learning rate; it is not trained while the critic warms up."""
    critic = config.algorithm.critic
    # In these steps the policy's schedule stands still: it has no update to count.
    alone = critic.critic_warmup_steps if critic.use else 0
    return _rate(config, config.trainer.learning_rate, config.steps - alone)


def critic_rate(config: RunConfig) -> LearningRate:
    """Return the critic's learning rate."""
    own = config.algorithm.critic.learning_rate
    return _rate(config, config.trainer.learning_rate if own is None else own, config.steps)


def _rate(config: RunConfig, highest: float, steps: int) -> LearningRate:
    """Return a learning rate over training steps, each of which has several optimizer steps."""
    # Settings count training steps, and optimizers their updates.
    updates = config.algorithm.updates
    return LearningRate(
        highest=highest,
        warmup_steps=config.trainer.warmup_steps * updates,
        schedule=config.trainer.schedule,
        steps=steps * updates,
    )
