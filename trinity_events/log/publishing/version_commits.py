"""Commits of weight versions, by the side that dispatched their parts; it needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from trinity_schemas import StepCommitted

from .metric_values import check_metrics, split_metrics
from .publisher import Publisher


def commit_version(
    publisher: Publisher, step: int, metrics: Mapping[str, object] | None = None
) -> None:
    """Publish that all parts of the step's version are dispatched.

    Args:
        publisher: Publisher of the trainer.
        step: The step.
        metrics: Numbers of Python, NumPy or torch.

    Raises:
        MetricRefused: A metric is no number. The version is committed, without it.
    """
    numbers, refused = split_metrics(metrics)
    publisher.publish(StepCommitted(step=step, kind="weights", metrics=numbers))
    # Last: a metric that is no number must not cost the version its commit.
    check_metrics(step, refused)
