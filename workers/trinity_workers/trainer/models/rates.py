"""Learning rates of a run, by optimizer step."""

from __future__ import annotations

from ...config.train_config import RunConfig
from ...engines.learning_rate import LearningRate


def policy_rate(config: RunConfig) -> LearningRate:
    """Return the policy's learning rate; it is not trained while the critic warms up."""
    critic = config.algorithm.critic
    alone = critic.warmup_steps if critic.use else 0
    return _rate(config, config.trainer.learning_rate, config.steps - alone)


def critic_rate(config: RunConfig) -> LearningRate:
    """Return the critic's learning rate."""
    own = config.algorithm.critic.learning_rate
    return _rate(config, config.trainer.learning_rate if own is None else own, config.steps)


def _rate(config: RunConfig, highest: float, steps: int) -> LearningRate:
    """Return a learning rate over training steps, each of which has several optimizer steps."""
    updates = config.algorithm.updates
    return LearningRate(
        highest=highest,
        ramp_steps=config.trainer.ramp_steps * updates,
        schedule=config.trainer.schedule,
        steps=steps * updates,
    )
