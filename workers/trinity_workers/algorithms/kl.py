"""Estimators of the KL divergence of the policy from a reference, of single sampled tokens."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .ratios import MAX_LOG_RATIO


def kl_estimate(
    logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Return an estimate of KL(pi || reference) at each token.

    Source: http://joschu.net/blog/kl-approx.html, with d = log pi - log reference:

    * k1 = d. Unbiased, and negative at times. The mean of its gradient is 0, so it belongs into
      the reward, or is weighted by the ratio (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    * k2 = d^2 / 2. Biased, and its gradient is that of the KL (arXiv 2510.01555).
    * k3 = exp(-d) - 1 + d. Unbiased and never negative; the penalty of GRPO (2402.03300, eq. 4).

    Args:
        logprobs: [B, R] float32, on samples of the policy.
        reference: [B, R] float32.
        estimator: Name of the estimator.
    """
    if estimator == "k1":
        return logprobs - reference
    if estimator == "k2":
        return (logprobs - reference).square() / 2
    # One token far from the reference would overflow float32, beyond 88 nats, and end the step.
    away = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return away.exp() - 1.0 - away
