"""Picture of a run's metrics over its steps; it needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..errors import PackageMissing, TrinityError

Points = Sequence[tuple[int, float]]
"""Steps and values, by step."""
_PANEL = (6.4, 2.6)
"""Inches of one panel."""


class PlotUnusable(TrinityError):
    """The picture cannot be drawn.

    Attributes:
        fault: ``none`` if the run has no metrics yet, ``metric`` if it has none of this name,
            ``format`` if the file's format is unknown.
        subject: The run, metric or file.
        reason: Metrics that there are, or the error.
    """

    fault: Literal["none", "metric", "format"]
    subject: str
    reason: str = ""
    texts: ClassVar = {
        "none": "run {subject} has no metrics to draw yet",
        "metric": "there are no metrics {subject}: this run has {reason}",
        "format": "{subject}: {reason}",
    }


class Curves:
    """Points by metric; a resumed run replaces the steps that do not stand any more."""

    def __init__(self) -> None:
        self._points: dict[str, dict[int, float]] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add values of a step; the largest of several stays, which is of the slowest process."""
        for name, value in values.items():
            points = self._points.setdefault(name, {})
            points[step] = max(value, points.get(step, value))

    def cut_after(self, step: int) -> None:
        """Forget all points after a step."""
        for name, points in self._points.items():
            self._points[name] = {at: value for at, value in points.items() if at <= step}

    def matching(self, names: Sequence[str]) -> dict[str, Points]:
        """Return the metrics of these names, or of these groups, in the given order.

        Raises:
            PlotUnusable: The run has no such metric.
        """
        curves: dict[str, Points] = {}
        for pattern in names:
            ours = [
                name for name in self._points if name == pattern or name.startswith(f"{pattern}/")
            ]
            if not ours:
                available = ", ".join(sorted(self._points)) or "none"
                raise PlotUnusable("metric", pattern, available)
            curves |= {name: sorted(self._points[name].items()) for name in sorted(ours)}
        return curves

    @property
    def names(self) -> list[str]:
        """Names of all metrics."""
        return sorted(self._points)


def draw(title: str, curves: Mapping[str, Points], path: Path) -> None:
    """Draw one panel a metric, in two columns; the file's ending is its format.

    Raises:
        PackageMissing: Matplotlib is not installed.
        PlotUnusable: It does not know the file's format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PackageMissing("plot", "matplotlib", "matplotlib") from None
    rows = -(-len(curves) // 2)
    figure = Figure(figsize=(2 * _PANEL[0], rows * _PANEL[1] + 0.6), layout="constrained")
    figure.suptitle(title)
    panels: Any = figure.subplots(rows, 2, squeeze=False)
    for panel, (name, points) in zip(panels.flat, curves.items(), strict=False):
        steps, values = zip(*points, strict=True)
        # Of few points a line shows little, and of one nothing.
        panel.plot(steps, values, linewidth=1.2, marker="." if len(points) < 20 else None)
        panel.set_title(name, loc="left", fontsize="medium")
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
    for panel in list(panels.flat)[len(curves) :]:
        panel.remove()
    try:
        figure.savefig(path)
    except ValueError as error:
        raise PlotUnusable("format", str(path), str(error)) from None
