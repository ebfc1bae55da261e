"""Options of AdamW and of the clip before it, for every engine."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class AdamWOptions(Struct, frozen=True, kw_only=True):
    """Options of an AdamW update, with the defaults of the configuration."""

    weight_decay: float = 0.01
    beta1: float = 0.9
    """Decay of the mean of the gradients."""
    # 0.99 averages the squares of 100 steps; torch's 0.999, of 1,000, more than most runs have.
    beta2: float = 0.99
    """Decay of the mean of their squares."""
    epsilon: float = 1e-8
    """Number that is added to the divisor of an update."""
    max_grad_norm: float = 1.0
    """Global norm to which the gradients are clipped."""

    @property
    def betas(self) -> tuple[float, float]:
        """Both decays, as torch takes them."""
        return self.beta1, self.beta2


def apply_adamw_options(optimizer: Any, options: AdamWOptions) -> None:
    """Set the options of an optimizer whose state was loaded.

    Optimizers of torch and Megatron restore the options that they were saved with, and with them
    the configuration of an earlier epoch.

    Args:
        optimizer: AdamW of torch, or an optimizer of Megatron around one.
        options: Options of the configuration.
    """
    for group in optimizer.param_groups:
        group["weight_decay"] = options.weight_decay
        group["betas"] = options.betas
        group["eps"] = options.epsilon
