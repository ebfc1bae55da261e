"""Corrections for samples of an engine whose probabilities are not quite the trainer's."""

from __future__ import annotations

from torch import Tensor

from .aggregation import Means
from .ratios import bounded_exp, sequence_mean, sequence_sum
from .settings import ImportanceSamplingConfig


def importance_weights(log_ratio: Tensor, mask: Tensor, config: ImportanceSamplingConfig) -> Tensor:
    """Return truncated weights min(w, cap): [B, R] float32, without gradient.

    By token w_t = pi/mu of the token; by sequence w = prod_t pi/mu of the response, for all of its
    tokens. Sources: truncated importance sampling, https://fengyao.notion.site/off-policy-rl;
    decoupled PPO (arXiv 2110.00641, and AReaL, 2505.24298, eq. 5), whose first factor this is.

    Args:
        log_ratio: [B, R] float32, log pi - log mu; pi is the trainer's policy, mu the engine's.
        mask: [B, R] bool.
        config: The settings: `weights` and `cap`.
    """
    # A weight is a constant of the loss: its own gradient would be that of another objective.
    exponent = log_ratio.detach()
    if config.weights == "sequence":
        exponent = sequence_sum(exponent, mask)[:, None].expand_as(exponent)  # (rows, response)
    weights = bounded_exp(exponent)
    return weights if config.cap is None else weights.clamp(max=config.cap)


def importance_mask(log_ratio: Tensor, mask: Tensor, config: ImportanceSamplingConfig) -> Tensor:
    """Return which tokens stay in the loss: [B, R] bool.

    A ratio must be within `mask_low` and `mask_high`:

    * `icepop`: pi/mu of the token (IcePop, arXiv 2510.18855). Its weights are by token, uncapped.
    * `geometric`: exp(mean_t (log pi - log mu)), of the response.
    * `sequence`: prod_t pi/mu, of the response. Both are in veRL's `rollout_corr_helper.py`, and
      from https://yingru.notion.site/When-Speed-Kills-Stability.

    Tokens that are masked still count in the denominator of the loss.

    Args:
        log_ratio: [B, R] float32, log pi - log mu.
        mask: [B, R] bool.
        config: The settings: `mask`, `mask_low` and `mask_high`.
    """
    exponent = log_ratio.detach()
    if config.mask != "icepop":
        of_rows = sequence_mean if config.mask == "geometric" else sequence_sum
        exponent = of_rows(exponent, mask)[:, None].expand_as(exponent)
    ratio = bounded_exp(exponent)  # (rows, response)
    return mask & (ratio >= config.mask_low) & (ratio <= config.mask_high)


def mismatch(log_ratio: Tensor, mask: Tensor) -> Means:
    """Return how far the trainer's policy is from the engine's, in veRL's words.

    `kl` and `k3_kl` estimate KL(mu || pi) of a token; `chi2_token` is the mean of (pi/mu)^2 - 1.
    """
    ratio = bounded_exp(log_ratio.detach())
    metrics = {
        "rollout_corr/kl": -log_ratio,
        # Samples are of the engine's policy mu, so these estimate KL(mu || pi); see .kl for k3.
        "rollout_corr/k3_kl": ratio - 1.0 - log_ratio,
        "rollout_corr/chi2_token": ratio.square() - 1.0,
    }
    return Means.from_tokens(metrics, mask)
