"""Figures of runs, and the intervals of their differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from msgspec import Struct

from .results import LearningResult

LAST = 3
"""Measurements at the end of a run whose mean is its level."""
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles at 0.975 of Student's t, for 1 and more degrees of freedom."""


class Interval(Struct, frozen=True):
    """Mean, and half the width of its 95 % interval; None of a single value."""

    mean: float
    half: float | None

    def shown(self, *, signed: bool = False) -> str:
        """Return the interval as text."""
        mean = f"{self.mean:{'+' if signed else ''}.3f}"
        return mean if self.half is None else f"{mean} ± {self.half:.3f}"


def t_interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values, with the 95 % interval of Student's t."""
    if len(values) == 1:
        return Interval(values[0], None)
    t = _T_95[len(values) - 2]
    return Interval(fmean(values), t * stdev(values) / math.sqrt(len(values)))


def level(result: LearningResult) -> float:
    """Return the mean share of exact answers in the last measurements."""
    return fmean(measurement.exact for measurement in result.curve[-LAST:])


def paired_differences(of: Iterable[LearningResult], base: Iterable[LearningResult]) -> list[float]:
    """Return the difference in level of each seed that both have."""
    levels: Mapping[int, float] = {result.seed: level(result) for result in base}
    return [level(result) - levels[result.seed] for result in of if result.seed in levels]


def band(results: Sequence[LearningResult]) -> list[tuple[float, float, float, float]]:
    """Return step, mean, lowest and highest share of exact answers over the seeds."""
    points = []
    for measured in zip(*(result.curve for result in results), strict=True):
        shares = [sample.exact for sample in measured]
        points.append((float(measured[0].step), fmean(shares), min(shares), max(shares)))
    return points
