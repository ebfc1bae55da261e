"""Bar charts as SVG, drawn from kept figures: no library, no font and no script is loaded."""

from __future__ import annotations

from collections.abc import Sequence
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
