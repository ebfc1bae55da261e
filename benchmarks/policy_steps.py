"""Weights of a real run: the demo's policy over its GRPO steps, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

Learning = Iterator[dict[str, torch.Tensor]]
"""Weights after each step, float32, by name; the tensors are the model's and change with it."""

_WARM_UP_STEPS = 400


def policy_steps(folder: Path, steps: int, learning_rate: float) -> Learning:
    """Warm up the policy for a folder once, and train it as the trainer does by default."""
    from trinity_workers.config.sections.trainer import TrainerConfig
    from trinity_workers.config.train_config import TrainConfig
    from trinity_workers.launch.warm_up import warm_up
    from trinity_workers.learning.policy import create_policy
    from trinity_workers.tasks import SpellBackward

    from .one_process import OneProcess

    settings = TrainConfig(steps=steps, trainer=TrainerConfig(learning_rate=learning_rate))
    if not (folder / "config.json").exists():
        create_policy(folder, settings.seed)
        task = SpellBackward(settings.seed)
        with _one_thread():
            warm_up(folder, task, settings.seed, max_steps=min(_WARM_UP_STEPS, 20 * steps))
    run = OneProcess(settings, folder)
    yield dict(_weights(run.model))
    for _ in range(steps):
        run.step()
        yield dict(_weights(run.model))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Give torch one thread for the block, as the launcher does for its warm-up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights as the FSDP engine publishes them, with names for a ParameterDict."""
    for name, parameter in model.named_parameters():
        yield name.replace(".", "_"), parameter.detach()
