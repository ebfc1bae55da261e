"""Advantages of each token from the rewards that follow it."""

from __future__ import annotations

import torch

from ..batch import Batch
from ..settings import AlgorithmConfig
from ..statistics import whitened
from ..types import Advantages, Reduce


def reinforce_plus_plus(batch: Batch, config: AlgorithmConfig, reduce: Reduce) -> Advantages:
    """Return the discounted sum of the rewards from each token on, normalised over the batch.

    Source: REINFORCE++ (arXiv 2501.03262): G_t = sum_{s >= t} gamma^(s - t) r_s, then
    (G_t - mean) / deviation over all tokens of the batch. Its KL penalty is in the rewards.
    Scale `none` leaves out the normalisation. Tokens that are not trained on are passed over.

    Returns [B, R] float32.
    """
    mask = batch.response_mask  # (rows, response)
    rewards = batch.need("token_rewards", "advantage reinforce++").double()
    following = torch.zeros_like(rewards[:, 0])
    columns = []
    for t in range(mask.shape[1] - 1, -1, -1):
        # A token of the environment is no action: it hands on the return without another discount.
        following = torch.where(mask[:, t], rewards[:, t] + config.gamma * following, following)
        columns.append(following)
    returns = torch.stack(columns[::-1], dim=1).masked_fill(~mask, 0.0)
    if config.divisor == "none":
        return Advantages(returns.float())
    return Advantages(whitened(returns, mask, config, reduce))


def gae(batch: Batch, config: AlgorithmConfig, reduce: Reduce) -> Advantages:
    """Return generalised advantage estimates, and the critic's targets A_t + V_t.

    Source: GAE (arXiv 1506.02438) eq. 16: A_t = sum_l (gamma lambda)^l delta_(t + l), with
    delta_t = r_t + gamma V_(t + 1) - V_t and V = 0 after the last token, also of an answer that its
    limit cut off. So do veRL (``compute_gae_advantage_return``) and TRL (``PPOTrainer``): the
    critic has no value of what would follow, from which a time limit is bootstrapped elsewhere
    (arXiv 1712.00378). Advantages, not targets, are then normalised over all tokens of the batch,
    as PPO's implementations do; scale `none` leaves that out. Tokens that are not trained on are
    passed over.

    Returns [B, R] float32, twice.
    """
    mask = batch.response_mask
    rewards = batch.need("token_rewards", "advantage gae").double()
    values = batch.need("values", "advantage gae").double()
    decay = config.gamma * config.gae_lambda
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    columns = []
    for t in range(mask.shape[1] - 1, -1, -1):
        # Both are 0 at the last token, which the docstring says of truncated answers, too.
        error = rewards[:, t] + config.gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], error + decay * next_advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        columns.append(next_advantage)
    advantages = torch.stack(columns[::-1], dim=1)
    # Before the normalisation: the critic must learn values of the scale of rewards.
    returns = (advantages + values).masked_fill(~mask, 0.0).float()
    if config.divisor == "none":
        return Advantages(advantages.masked_fill(~mask, 0.0).float(), returns)
    return Advantages(whitened(advantages, mask, config, reduce), returns)
