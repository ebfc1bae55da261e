"""Checks of runs whose rollouts the trainer's own ranks answer."""

from __future__ import annotations

from ..train_config import TrainConfig
from .base import Contradictions, FormatField

_NEEDED = {
    "sync.style": "trainer_driven",
    "sync.method": "memory",
    "sync.interval": 1,
    "sync.max_staleness": 0,
    "rollouts.on_update": "finish",
}
"""Values that a colocated run has: every answer is of the weights that the next step trains."""


def check_colocated(config: TrainConfig, named: FormatField) -> Contradictions:
    """Yield contradictions of a colocated run's settings: the fields' paths, and a sentence.

    Args:
        config: The run.
        named: Names a field, given by its path, in the sentences.
    """
    trainer, colocated = config.trainer, named("trainer.colocated")
    tensor = trainer.rollout_tensor_parallel
    if tensor is not None:
        yield from _check_rollout_layout(config, tensor, named)
    if not trainer.colocated:
        return
    for path, value in _NEEDED.items():
        section, field = path.split(".")
        if getattr(getattr(config, section), field) != value:
            yield (
                ("trainer.colocated", path),
                f"{colocated} generates between two steps, with the weights of the last one: set "
                f"{named(path)} {value}, or {colocated} false",
            )
    if config.model.lora.rank:
        yield (
            ("trainer.colocated", "model.lora.rank"),
            f"{colocated} generates with whole weights, and {named('model.lora.rank')} trains "
            f"adapters: set {colocated} false, or leave the adapters out",
        )
    if config.explorer.dtype not in {None, config.model.dtype}:
        yield (
            ("trainer.colocated", "explorer.dtype", "model.dtype"),
            f"{colocated} generates in {named('model.dtype')}: leave {named('explorer.dtype')} out",
        )


def _check_rollout_layout(config: TrainConfig, tensor: int, named: FormatField) -> Contradictions:
    trainer, field = config.trainer, named("trainer.rollout_tensor_parallel")
    if not trainer.colocated:
        yield (
            ("trainer.rollout_tensor_parallel", "trainer.colocated"),
            f"{field} is for ranks that generate: set {named('trainer.colocated')} true, or leave "
            "it out",
        )
    if trainer.engine != "megatron":
        yield (
            ("trainer.rollout_tensor_parallel", "trainer.engine"),
            f"{field} is for Megatron only: leave it out, or set {named('trainer.engine')} "
            "megatron",
        )
    elif trainer.ranks % tensor:
        yield (
            ("trainer.rollout_tensor_parallel", "trainer.ranks"),
            f"{field} is {tensor}, and {trainer.ranks} trainers cannot be divided into groups of "
            "so many: choose a divisor",
        )
