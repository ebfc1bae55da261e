"""Losses that bound the ratio of the current to the old policy."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ratios import bounded_exp, sequence_mean
from ..settings import AlgorithmConfig
from ..types import PolicyTokens, TokenLosses


def ppo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """Return the clipped surrogate of each token, with bounds of their own below and above.

    Sources: PPO (arXiv 1707.06347) eq. 7; DAPO's two bounds (2503.14476) eq. 8; dual-clip
    PPO (1912.09729), where c is `dual_clip`:

    l = -min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 at most -c A,
    r = exp(log pi - log pi_old).

    Losses are [B, R] float32. `pg_clipfrac` and `pg_clipfrac_lower` are the shares of tokens on
    which the clip and the dual clip took the gradient away.
    """
    ratio = bounded_exp(tokens.logprobs - tokens.old_logprobs)
    return _clipped(ratio, tokens.advantages, config)


def gspo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """Return the clipped surrogate with one ratio for a whole response.

    Source: GSPO (arXiv 2507.18071) eq. 5 to 7, in the form of its eq. 13 and 14, whose gradient is
    the same and whose advantages may differ by token:

    l = -min(s A, clip(s, 1 - low, 1 + high) A), s_it = sg(s_i) pi_it / sg(pi_it),
    s_i = exp(1/|y_i| sum_t (log pi_it - log pi_old,it)).

    Losses are [B, R] float32. `pg_clipfrac` is the share of clipped tokens.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs
    whole = sequence_mean(log_ratio, tokens.mask)[:, None].detach()
    # The value is the response's ratio; the gradient is that of each token's log-probability.
    ratio = bounded_exp(tokens.logprobs - tokens.logprobs.detach() + whole)
    return _clipped(ratio, tokens.advantages, config)


def cispo(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    """Return the policy gradient, weighted by the clipped ratio: no token loses its gradient.

    Source: CISPO, MiniMax-M1 (arXiv 2506.13585) eq. 4 and 5:

    l = -sg(clip(r, 1 - low, 1 + high)) A log pi.

    Losses are [B, R] float32. `pg_clipfrac` is the share of tokens whose ratio was clipped.
    """
    ratio = bounded_exp(tokens.logprobs - tokens.old_logprobs).detach()
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return TokenLosses(
        -clipped * tokens.advantages * tokens.logprobs, {"pg_clipfrac": (clipped != ratio).float()}
    )


def _clipped(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> TokenLosses:
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
    # The larger loss is the smaller objective: the clip never makes an update look better.
    losses = torch.maximum(free, bounded)
    metrics = {"pg_clipfrac": (bounded > free).float()}
    if config.dual_clip is not None:
        most = -config.dual_clip * advantages
        # Where A < 0 and the ratio is large, the plain clip leaves the loss without an upper bound.
        beyond = (advantages < 0) & (losses > most)
        losses = torch.where(beyond, most, losses)
        metrics["pg_clipfrac_lower"] = beyond.float()
    return TokenLosses(losses, metrics)
