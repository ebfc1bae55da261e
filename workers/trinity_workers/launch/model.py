"""The model that a run starts from: a user's, or the built-in one, warmed up."""

from __future__ import annotations

from pathlib import Path


def make_model(folder: Path, seed: int, task: str = "spell-backward") -> tuple[int, float]:
    """Create the built-in policy, and warm it up on a built-in task.

    Returns the steps it took and its accuracy.
    """
    import torch

    from ..learning.policy import create_policy
    from ..tasks import built_in_task
    from .warm_up import warm_up

    # One thread: the number of threads changes the sums, and so the weights of a seed.
    torch.set_num_threads(1)
    create_policy(folder, seed)
    return warm_up(folder, built_in_task(task, seed), seed)
