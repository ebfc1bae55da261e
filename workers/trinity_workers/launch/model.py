"""The model that the demo starts from: random, then warmed up until it is sometimes right."""

from __future__ import annotations

from pathlib import Path


def make_model(folder: Path, task_name: str, seed: int) -> tuple[int, float]:
    """Create and warm up the policy in ``folder``; returns the steps it took and its accuracy."""
    import torch

    from ..learning.policy import create_policy
    from ..learning.tasks import make_task
    from ..learning.warm_up import warm_up

    torch.set_num_threads(1)
    create_policy(folder, seed)
    return warm_up(folder, make_task(task_name), seed)
