"""Preparation of a step's batch: rewards of tokens, filters, advantages."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .aggregation import Means
from .batch import NO_GROUP, Batch, at_last_token
from .errors import LengthMissing
from .kl import kl_estimate
from .ratios import sequence_mean, sequence_sum
from .registry import find_advantage
from .settings import AlgorithmConfig, OverlongConfig
from .statistics import group_statistics
from .types import Reduce, this_rank_alone


class Prepared(NamedTuple):
    """Batch with advantages, and the means of its preparation."""

    batch: Batch
    metrics: Means


def prepare(batch: Batch, config: AlgorithmConfig, reduce: Reduce = this_rank_alone) -> Prepared:
    """Return the batch with advantages (and returns), and without tokens that filters leave out.

    Call it once for a step, before the batch is split, with whole groups on each rank.

    1. Rewards of tokens are `token_rewards` if the batch has them, else each row's reward at its
       last token. The overlong penalty is added there, and a KL penalty in the reward is
       subtracted at each token.
    2. Advantages are estimated of all rows.
    3. Overlong rows and groups without variance are taken out of `response_mask`, where the
       settings say so.

    Args:
        batch: The step's rows of this rank. Padding rows stay as they are.
        config: The settings.
        reduce: Sum over ranks, for what is normalised over the whole batch.

    Raises:
        AlgorithmError: if a field is missing that the settings need.
    """
    mask = batch.response_mask
    penalty = overlong_penalty(batch, config.overlong)
    rewards = batch.token_rewards
    if rewards is None:
        rewards = at_last_token(batch.rewards, mask)
    rewards = rewards + at_last_token(penalty, mask)
    divergence = None
    if config.kl.coefficient and config.kl.where == "reward":
        policy = batch.need(f"{config.importance_sampling.ratio_to}_logprobs", "the KL penalty")
        reference = batch.need("reference_logprobs", "the KL penalty")
        divergence = kl_estimate(policy, reference, config.kl.estimator).masked_fill(~mask, 0.0)
        rewards = rewards - config.kl.coefficient * divergence
    rewards = rewards.masked_fill(~mask, 0.0)

    rewarded = replace(batch, token_rewards=rewards)
    estimate = find_advantage(config.advantage)(rewarded, config, reduce)
    # Of the rewards themselves: penalties of length or KL differ where answers are equally right.
    equal = group_statistics(batch.rewards, batch.groups, config).equal
    training_mask = _training_mask(batch, config, equal)
    return Prepared(
        replace(
            rewarded,
            response_mask=training_mask,
            # Masked after the estimate: a row that is left out still counts in its group's mean.
            advantages=estimate.advantages.masked_fill(~training_mask, 0.0),
            returns=None
            if estimate.returns is None
            else estimate.returns.masked_fill(~training_mask, 0.0),
        ),
        _metrics(batch, penalty, equal, divergence),
    )


def _training_mask(batch: Batch, config: AlgorithmConfig, equal: Tensor) -> Tensor:
    mask = batch.response_mask
    if config.overlong.mask:
        mask = mask & batch.finished[:, None]
    if config.filters.zero_variance == "mask":
        mask = mask & ~equal[:, None]
    return mask


def _metrics(batch: Batch, penalty: Tensor, equal: Tensor, divergence: Tensor | None) -> Means:
    rows = {
        "score": batch.rewards,
        "response_length": batch.response_mask.sum(dim=-1),
        "overlong": ~batch.finished,
        "overlong_penalty": penalty,
        "zero_variance": equal,
    }
    if batch.behaviour_logprobs is not None:
        # An estimate of the entropy that costs nothing: what was sampled is as likely as it is.
        rows["rollout_entropy"] = -sequence_mean(batch.behaviour_logprobs, batch.response_mask)
    if divergence is not None:
        rows["reward_kl"] = sequence_sum(divergence, batch.response_mask)
    return Means.from_rows(rows, batch.groups != NO_GROUP)


def overlong_penalty(batch: Batch, config: OverlongConfig) -> Tensor:
    """Return the penalty of each response, which is added to its reward: [B] float32, at most 0.

    Source: DAPO (arXiv 2503.14476) eq. 13, with L the limit and C = `buffer` times L: 0 up to L - C
    tokens, then (L - C - |y|) / C, and -1 beyond L; times `penalty`.

    |y| counts the policy's tokens.
    """
    length = batch.response_mask.sum(dim=-1).float()
    if not config.buffer:
        return torch.zeros_like(length)
    if config.limit is None:
        raise LengthMissing("overlong.limit")
    buffer = config.buffer * config.limit
    return config.penalty * ((config.limit - buffer - length) / buffer).clamp(-1.0, 0.0)
