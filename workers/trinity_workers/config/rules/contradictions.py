"""All rules of a configuration, in the order in which they are reported."""

from __future__ import annotations

from ..train_config import TrainConfig
from .algorithm import check_algorithm
from .base import Contradictions, FormatField
from .checkpoints import check_checkpoints
from .colocated import check_colocated
from .evaluation import check_evaluation
from .lora import check_lora
from .micro_batches import check_micro_batches
from .rewards import check_rewards
from .rollouts import check_updates, check_window_and_turns
from .sync import check_method, check_published_dtype, check_schedule
from .trainer import check_trainer


def find_contradictions(config: TrainConfig, named: FormatField) -> Contradictions:
    """Yield what contradicts itself in a configuration: the fields' paths, and a sentence.

    Args:
        config: The configuration.
        named: Formats a field, given by its path, for the sentences.
    """
    yield from check_trainer(config, named)
    yield from check_colocated(config, named)
    yield from check_lora(config, named)
    yield from check_checkpoints(config, named)
    yield from check_micro_batches(config, named)
    yield from check_algorithm(config, named)
    yield from check_rewards(config.rewards, config.task.reward, named)
    yield from check_schedule(config.sync, named)
    yield from check_published_dtype(config, named)
    yield from check_window_and_turns(config, named)
    yield from check_method(config.sync, named)
    yield from check_updates(config, named)
    yield from check_evaluation(
        config.evaluation, named, steps=config.steps, keeps_versions=config.keeps_versions
    )
