"""Charts as SVG, drawn from kept figures: no library, no font and no script is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _BAR, _STEP, _TOP = 860, 20, 32, 44
_LEFT = 390
"""Pixels for the labels."""
_RIGHT = 110
"""Pixels for the figures behind the bars."""
_OURS, _OTHERS = "#3f6fb5", "#b9c0cb"


class Bar(NamedTuple):
    """One bar: its label, the figure as it is shown, its length, and whether it is ours."""

    label: str
    shown: str
    value: float
    ours: bool


def bar_chart(title: str, bars: Sequence[Bar]) -> str:
    """Return a chart of horizontal bars from zero, in the order given."""
    most = max(bar.value for bar in bars)
    height = _TOP + _STEP * len(bars) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="14" role="img" aria-labelledby="t">',
        f'  <title id="t">{escape(title)}</title>',
        f'  <rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'  <text x="12" y="26" font-weight="bold" fill="#222222">{escape(title)}</text>',
    ]
    for number, bar in enumerate(bars):
        y = _TOP + _STEP * number
        width = max(2.0, (_WIDTH - _LEFT - _RIGHT) * bar.value / most)
        weight = ' font-weight="bold"' if bar.ours else ""
        color = _OURS if bar.ours else _OTHERS
        lines += [
            f'  <text x="{_LEFT - 10}" y="{y + 15}" text-anchor="end" fill="#222222"{weight}>'
            f"{escape(bar.label)}</text>",
            f'  <rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{color}"/>',
            f'  <text x="{_LEFT + width + 8:.1f}" y="{y + 15}" fill="#222222"{weight}>'
            f"{escape(bar.shown)}</text>",
        ]
    return "\n".join([*lines, "</svg>", ""])


class Line(NamedTuple):
    """One line: its label, and at each x the middle, the lowest and the highest y."""

    label: str
    points: Sequence[tuple[float, float, float, float]]


class Panel(NamedTuple):
    """One diagram of a picture, with its lines."""

    title: str
    lines: Sequence[Line]


_COLORS = ("#222222", "#3f6fb5", "#d9822b", "#3a9b6b", "#a23b72", "#8a6d3b", "#5b5ea6", "#c0392b")
_PANEL, _HIGH, _AXIS, _GAP = 250, 220, 54, 36
"""Pixels of a panel's width and height, of the space for an axis, and between panels."""


def line_chart(title: str, panels: Sequence[Panel], x_label: str, y_label: str) -> str:
    """Return panels side by side, with y from 0 to 1 and a band from lowest to highest.

    A label has one colour in all panels.
    """
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    colors = {label: _COLORS[at % len(_COLORS)] for at, label in enumerate(labels)}
    width = _AXIS + len(panels) * (_PANEL + _GAP)
    rows = -(-len(labels) // 3)
    top = 60 + 20 * rows + 10
    height = top + _HIGH + _AXIS + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12" role="img" aria-labelledby="t">',
        f'  <title id="t">{escape(title)}</title>',
        f'  <rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'  <text x="12" y="24" font-size="14" font-weight="bold" fill="#222222">'
        f"{escape(title)}</text>",
    ]
    for at, label in enumerate(labels):
        x, y = 12 + (at % 3) * (width - 24) / 3, 48 + 20 * (at // 3)
        lines += [
            f'  <line x1="{x:.0f}" y1="{y - 4}" x2="{x + 22:.0f}" y2="{y - 4}" '
            f'stroke="{colors[label]}" stroke-width="3"/>',
            f'  <text x="{x + 28:.0f}" y="{y}" fill="#222222">{escape(label)}</text>',
        ]
    last = [line.points[-1][0] for panel in panels for line in panel.lines if line.points]
    for at, panel in enumerate(panels):
        place = _Place(_AXIS + at * (_PANEL + _GAP), top, max(last, default=1.0))
        lines += _panel(panel, place, colors, x_label)
    middle = top + _HIGH / 2
    lines.append(
        f'  <text x="12" y="{middle:.0f}" transform="rotate(-90 12 {middle:.0f})" '
        f'text-anchor="middle" fill="#222222">{escape(y_label)}</text>'
    )
    return "\n".join([*lines, "</svg>", ""])


class _Place(NamedTuple):
    """Place of a panel in the picture, and the x at its right edge."""

    edge: int
    top: int
    most: float

    def of(self, x: float, y: float) -> str:
        """Return the pixels of a point."""
        return f"{self.edge + _PANEL * x / self.most:.1f},{self.top + _HIGH * (1 - y):.1f}"


def _panel(panel: Panel, place: _Place, colors: Mapping[str, str], x_label: str) -> list[str]:
    edge, top, most = place
    middle = edge + _PANEL / 2
    drawn = [
        f'  <text x="{middle:.0f}" y="{top - 8}" text-anchor="middle" font-weight="bold" '
        f'fill="#222222">{escape(panel.title)}</text>',
        f'  <text x="{middle:.0f}" y="{top + _HIGH + 36}" text-anchor="middle" fill="#222222">'
        f"{escape(x_label)}</text>",
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = top + _HIGH * (1 - share)
        drawn += [
            f'  <line x1="{edge}" y1="{y:.0f}" x2="{edge + _PANEL}" y2="{y:.0f}" '
            'stroke="#dddddd"/>',
            f'  <text x="{edge - 4}" y="{y + 4:.0f}" text-anchor="end" font-size="10" '
            f'fill="#555555">{share:g}</text>',
            f'  <text x="{edge + _PANEL * share:.0f}" y="{top + _HIGH + 16}" text-anchor="middle" '
            f'font-size="10" fill="#555555">{most * share:.0f}</text>',
        ]
    for line in panel.lines:
        band = [place.of(x, high) for x, _, _, high in line.points]
        band += [place.of(x, low) for x, _, low, _ in reversed(line.points)]
        color = colors[line.label]
        drawn += [
            f'  <polygon points="{" ".join(band)}" fill="{color}" fill-opacity="0.12"/>',
            f'  <polyline points="{" ".join(place.of(x, y) for x, y, _, _ in line.points)}" '
            f'fill="none" stroke="{color}" stroke-width="2"/>',
        ]
    return drawn
