"""Statistics in float64: of groups, of all ranks' batch, and of a critic's values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .aggregation import Means, masked_sum
from .batch import Batch
from .filters import EQUAL_WITHIN
from .settings import AlgorithmConfig
from .types import Reduce

_EPSILON = 1e-8
"""Added to a batch's variance, as in veRL's `masked_whiten`: equal values become 0, not noise."""
_VALUES, _RETURNS = "critic/values/mean", "critic/returns/mean"
_SQUARED_RETURNS, _ERRORS, _SQUARED_ERRORS = "returns^2", "errors", "errors^2"


class GroupStatistics(NamedTuple):
    """Statistics of each row's group: [B] each."""

    mean: Tensor
    """float64."""
    deviation: Tensor
    """float64."""
    size: Tensor
    """int64. Rows of the group."""
    equal: Tensor
    """bool. True if all values of the group are equal within :data:`.filters.EQUAL_WITHIN`."""


def group_statistics(values: Tensor, groups: Tensor, config: AlgorithmConfig) -> GroupStatistics:
    """Return the statistics of each row's group.

    Args:
        values: [B].
        groups: [B] int64.
        config: The settings, of which `deviation` counts.
    """
    _, place = torch.unique(groups, return_inverse=True)
    exact = values.double()
    number = int(place.max()) + 1 if len(place) else 0
    count = torch.zeros(number, dtype=torch.int64, device=place.device)
    count = count.index_add(0, place, torch.ones_like(place))
    empty = torch.zeros(number, dtype=torch.float64, device=place.device)
    mean = (empty.index_add(0, place, exact) / count)[place]
    # From differences: the mean of squares less the squared mean cancels for equal rewards.
    squares = empty.index_add(0, place, (exact - mean).square())
    divisor = count - 1 if config.deviation == "sample" else count
    deviation = (squares / divisor.clamp(min=1)).sqrt()[place]
    low = empty.scatter_reduce(0, place, exact, "amin", include_self=False)[place]
    high = empty.scatter_reduce(0, place, exact, "amax", include_self=False)[place]
    # Tested on the values, as :func:`.filters.is_informative` does: the deviation of equal values
    # may be a rounding error above 0.
    equal = high - low <= EQUAL_WITHIN * torch.maximum(low.abs(), high.abs()).clamp(min=1.0)
    return GroupStatistics(mean, deviation, count[place], equal)


class Moments(NamedTuple):
    """Mean and deviation over all ranks: 0-dimensional float64."""

    mean: Tensor
    deviation: Tensor


def moments(values: Tensor, mask: Tensor, config: AlgorithmConfig, reduce: Reduce) -> Moments:
    """Return mean and deviation of values where the mask is true, over all ranks."""
    exact = values.double()
    total = reduce(torch.stack([masked_sum(exact, mask), mask.sum().double()]))
    mean = total[0] / total[1].clamp(min=1.0)
    # A second exchange, since squares less the squared mean would cancel for nearly equal values.
    squares = reduce(masked_sum((exact - mean).square(), mask))
    divisor = total[1] - 1.0 if config.deviation == "sample" else total[1]
    return Moments(mean, (squares / divisor.clamp(min=1.0) + _EPSILON).sqrt())


def whitened(values: Tensor, mask: Tensor, config: AlgorithmConfig, reduce: Reduce) -> Tensor:
    """Return (values - mean) / deviation of the batch of all ranks; 0 where the mask is false."""
    mean, deviation = moments(values, mask, config, reduce)
    return ((values.double() - mean) / deviation).masked_fill(~mask, 0.0).float()


def value_means(batch: Batch) -> Means:
    """Return the means of values and returns, and those that their explained variance needs."""
    values = batch.need("values", "the critic's metrics").double()
    returns = batch.need("returns", "the critic's metrics").double()
    means = {
        _VALUES: values,
        _RETURNS: returns,
        _SQUARED_RETURNS: returns.square(),
        _ERRORS: returns - values,
        _SQUARED_ERRORS: (returns - values).square(),
    }
    return Means.from_tokens(means, batch.response_mask)


def explained_variance(means: Mapping[str, float]) -> dict[str, float]:
    """Return means with `critic/vf_explained_var` in the place of those that it is made of.

    It is 1 - Var(returns - values) / Var(returns), and 0 where all returns are equal. Means without
    those of :func:`value_means` stay as they are.
    """
    metrics = dict(means)
    if _SQUARED_RETURNS not in metrics:
        return metrics
    # Sums of squares add up over parts and ranks, as all means here do, and need no second pass.
    variance = metrics.pop(_SQUARED_RETURNS) - metrics[_RETURNS] ** 2
    unexplained = metrics.pop(_SQUARED_ERRORS) - metrics.pop(_ERRORS) ** 2
    metrics["critic/vf_explained_var"] = 1.0 - unexplained / variance if variance > 1e-12 else 0.0
    return metrics
