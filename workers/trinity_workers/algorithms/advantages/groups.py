"""Advantages that compare the answers to one prompt: one number for all tokens of a response."""

from __future__ import annotations

from torch import Tensor

from ..batch import NO_GROUP, Batch
from ..errors import LoneSample
from ..settings import AlgorithmConfig
from ..statistics import GroupStatistics, group_statistics, moments, whitened
from ..types import Advantages, Reduce


def grpo(batch: Batch, config: AlgorithmConfig, reduce: Reduce) -> Advantages:
    """Return (r_i - mean(r)) / (deviation(r) + epsilon) within each group.

    Source: GRPO, DeepSeekMath (arXiv 2402.03300) section 4.1.2; the paper has no epsilon, and its
    implementations do (TRL, veRL). With scale `none` it is Dr. GRPO's r_i - mean(r) (arXiv
    2503.20783, section 3.2); with scale `batch` the deviation is that of all rewards of the batch
    (arXiv 2508.08221). It is 0 where all rewards of a group are equal up to rounding.

    r_i is the sum of the row's `token_rewards`. Returns [B, R] float32.
    """
    scores, groups = _compared(batch, config)
    centred = scores - groups.mean
    if config.divisor == "group":
        # Without an epsilon, differences of 1e-7 would become advantages of 1.
        divisor = groups.deviation.masked_fill(groups.equal, 1.0) + config.deviation_epsilon
        centred = centred / divisor
    # Padding rows are left out: their scores of 0 would pull on the mean and the deviation.
    elif config.divisor == "batch":
        centred = centred / moments(scores, batch.groups != NO_GROUP, config, reduce).deviation
    return _spread(centred.masked_fill(groups.equal, 0.0), batch)


def rloo(batch: Batch, config: AlgorithmConfig, reduce: Reduce) -> Advantages:
    """Return r_i less the mean reward of the other samples of its group.

    Source: RLOO (arXiv 2402.14740), its estimator: r_i - 1/(k - 1) sum_{j != i} r_j, computed as
    k/(k - 1) (r_i - mean(r)). It is 0 where all rewards of a group are equal up to rounding.

    r_i is the sum of the row's `token_rewards`. Returns [B, R] float32.

    Raises:
        AlgorithmError: if a group has one sample.
    """
    scores, groups = _compared(batch, config)
    alone = (groups.size == 1) & (batch.groups != NO_GROUP)
    if bool(alone.any()):
        raise LoneSample(int(batch.groups[alone][0]))
    # A padding row may be alone in its group, and infinity times its 0 would be NaN.
    others = groups.size / (groups.size - 1).clamp(min=1)
    centred = (scores - groups.mean).masked_fill(groups.equal, 0.0)
    return _spread(centred * others, batch)


def reinforce_plus_plus_baseline(
    batch: Batch, config: AlgorithmConfig, reduce: Reduce
) -> Advantages:
    """Return r_i - mean(r) within each group, then normalised over all tokens of the batch.

    Source: REINFORCE++ (arXiv 2501.03262), variant with baseline. Scale `none` leaves out the
    second step.

    r_i is the sum of the row's `token_rewards`. Returns [B, R] float32.
    """
    scores, groups = _compared(batch, config)
    advantages = _spread((scores - groups.mean).masked_fill(groups.equal, 0.0), batch).advantages
    if config.divisor == "none":
        return Advantages(advantages)
    return Advantages(whitened(advantages, batch.response_mask, config, reduce))


def _compared(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, GroupStatistics]:
    # float64: a division by a small deviation magnifies what float32 rounds off.
    rewards = batch.need("token_rewards", f"advantage {config.advantage}").double()
    scores = rewards.masked_fill(~batch.response_mask, 0.0).sum(dim=-1)  # (rows,)
    return scores, group_statistics(scores, batch.groups, config)


def _spread(rows: Tensor, batch: Batch) -> Advantages:
    return Advantages((rows[:, None] * batch.response_mask).float())  # (rows, response)
