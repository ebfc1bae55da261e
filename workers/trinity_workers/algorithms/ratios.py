"""Ratios of probabilities, in logarithms as long as can be."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of logarithms, in nats: e^20 says no more than e^30, which would overflow a loss."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return the ratio, between e^-20 and e^20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return each row's sum of values [B, R] where the mask is true: [B]."""
    return values.masked_fill(~mask, 0.0).sum(dim=-1)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return each row's mean of values [B, R] where the mask is true: [B], 0 without any."""
    return sequence_sum(values, mask) / mask.sum(dim=-1).clamp(min=1)  # (rows,)
