"""Metrics of a critic's values and their targets."""

from __future__ import annotations

from collections.abc import Mapping

from .aggregation import Means
from .batch import Batch

_VALUES, _RETURNS = "critic/values/mean", "critic/returns/mean"
_SQUARED_RETURNS, _ERRORS, _SQUARED_ERRORS = "returns^2", "errors", "errors^2"


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
    variance = metrics.pop(_SQUARED_RETURNS) - metrics[_RETURNS] ** 2
    unexplained = metrics.pop(_SQUARED_ERRORS) - metrics.pop(_ERRORS) ** 2
    metrics["critic/vf_explained_var"] = 1.0 - unexplained / variance if variance > 1e-12 else 0.0
    return metrics
