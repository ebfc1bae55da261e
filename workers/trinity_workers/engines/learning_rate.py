"""Learning rate of each optimizer step."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

from msgspec import Struct

Schedule: TypeAlias = Literal["constant", "linear", "cosine"]


class LearningRate(Struct, frozen=True, kw_only=True):
    """Learning rate that rises over a warm-up, then follows a schedule.

    It depends on the number of the step alone, so a resumed run continues it exactly.
    """

    highest: float
    """Learning rate at the end of the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps over which it rises from 0."""
    schedule: Schedule = "constant"
    """Course after the warm-up: constant, or down to 0 on a line or on half a cosine."""
    steps: int = 0
    """Optimizer steps after which it is 0; schedule constant has no use for it."""

    def share(self, step: int) -> float:
        """Return the share of the highest learning rate for a step; the first step is 0."""
        if step < self.warmup_steps:
            # From 1 / warmup_steps on: a first step at a rate of 0 would move nothing.
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        return 1.0 - done if self.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2

    def at(self, step: int) -> float:
        """Return the learning rate for a step; the first step is 0."""
        return self.highest * self.share(step)


def apply_learning_rate(scheduler: Any, highest: float) -> None:
    """Set the highest learning rate of an optimizer whose state was loaded.

    Optimizers and schedulers of torch restore the rate that they were saved with, and with it the
    configuration of an earlier epoch. Warm-up and course are functions, which no state has.

    Args:
        scheduler: ``LambdaLR`` of the optimizer.
        highest: Learning rate at the end of the warm-up.
    """
    # LambdaLR multiplies base_lrs at its next step, and does not compute the current rate again.
    scheduler.base_lrs = [highest for _ in scheduler.base_lrs]
    for group, share in zip(scheduler.optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        group["initial_lr"] = highest
        group["lr"] = highest * share(scheduler.last_epoch)
    # Private, and what get_last_lr() returns until the next step.
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


def as_learning_rate(value: float | LearningRate) -> LearningRate:
    """Return the learning rate; a number is one without warm-up and schedule."""
    return value if isinstance(value, LearningRate) else LearningRate(highest=value)
