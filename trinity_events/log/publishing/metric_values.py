"""Metrics of training loops as numbers: Python's own, and those of NumPy and torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsFloat

from ...errors import TrinityError

_NAMED = 8
"""Metrics that an error names: all of a loop may be of one wrong type."""


class MetricRefused(TrinityError):
    """Metrics are no numbers. What they came with was published without them.

    Attributes:
        step: The step.
        types: Name of the type of each refused metric.
    """

    step: int
    types: Mapping[str, str]
    text = (
        "step {step} was published without {_named}: a metric is one number, so give a number or "
        "leave it out"
    )

    @property
    def _named(self) -> str:
        named = ", ".join(f"{name!r} ({kind})" for name, kind in list(self.types.items())[:_NAMED])
        unnamed = len(self.types) - _NAMED
        return f"{named} and {unnamed} more" if unnamed > 0 else named


def split_metrics(metrics: Mapping[str, object] | None) -> tuple[dict[str, float], dict[str, str]]:
    """Return metrics as numbers, and the type of each one that is no number.

    Arrays and tensors of one element are numbers, as are booleans. NaN and infinity are, too: a
    diverging loss is what its reader looks for. Text is none, though ``float`` reads it.
    """
    numbers: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, value in (metrics or {}).items():
        number = _number(value)
        if number is None:
            refused[str(name)] = type(value).__name__
        else:
            numbers[str(name)] = number
    return numbers, refused


def check_metrics(step: int, refused: Mapping[str, str]) -> None:
    """Raise MetricRefused, after the step was published, if some of its metrics are no numbers."""
    if refused:
        raise MetricRefused(step, refused)


def _number(value: object) -> float | None:
    try:
        # Of NumPy and torch, without an import of either: both convert a single element so.
        item = getattr(value, "item", None)
        plain = item() if callable(item) else value
        # Decimals and fractions are numbers, too; text has no __float__.
        return float(plain) if isinstance(plain, SupportsFloat) else None
    except Exception:  # the library's own, such as for a tensor of several elements
        return None
