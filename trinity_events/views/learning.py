"""Progress and reward of a run, in one line each."""

from __future__ import annotations

from collections.abc import Sequence

from ..core import MonitorState

_BLOCKS = "▁▂▃▄▅▆▇█"
_SETS = 4
"""Sets of held-out questions that are shown; status has them all."""
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def sparkline(values: Sequence[float]) -> str:
    """Return finite values as bars of one character each, from their least to their greatest."""
    if not values:
        return ""
    least, greatest = min(values), max(values)
    if least == greatest:  # flat: neither high nor low
        return _BLOCKS[len(_BLOCKS) // 2] * len(values)
    scale = (len(_BLOCKS) - 1) / (greatest - least)
    return "".join(_BLOCKS[round((value - least) * scale)] for value in values)


def format_seconds(seconds: float) -> str:
    """Return seconds for people, such as ``1.9 s``, ``12 min`` or ``3 h 20 min``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    if seconds < 2 * _DAY:
        return f"{seconds // _HOUR:.0f} h {seconds % _HOUR // _MINUTE:.0f} min"
    return f"{seconds // _DAY:.0f} d {seconds % _DAY // _HOUR:.0f} h"


def format_step(state: MonitorState) -> str:
    """Return the trainer's step, of how many where that is known."""
    total = state.learning.total_steps
    return f"step {state.trainer_step}" + ("" if total is None else f" of {total}")


def format_pace(state: MonitorState) -> str:
    """Return the seconds of a step and those that are left; empty where neither is known."""
    pace = state.learning.seconds_per_step
    if pace is None or state.closed is not None:
        return ""
    remaining = state.learning.seconds_left(state.trainer_step)
    return f"{format_seconds(pace)} a step" + (
        "" if remaining is None else f", {format_seconds(remaining)} left"
    )


def format_reward(state: MonitorState) -> str:
    """Return a sparkline of the rewards, with the mean of the first and of the last steps."""
    learning = state.learning
    if learning.reward is None or learning.first_reward is None:
        return ""
    bars = sparkline([point.mean for point in learning.points])
    return f"{bars} {learning.first_reward:.3g} at first, {learning.reward:.3g} now"


def format_held_out(state: MonitorState) -> list[tuple[str, str]]:
    """Return each set of held-out questions with the result of its last evaluation."""
    rows = []
    for name, evaluated in sorted(state.evaluations.items())[:_SETS]:
        last = evaluated.last
        if last is None:
            continue
        if last.failure is not None:
            rows.append((name, f"evaluation FAILED at step {last.version.step}: {last.failure}"))
        elif (mean := last.metrics.get("mean")) is not None:
            low, high = last.metrics.get("mean_low"), last.metrics.get("mean_high")
            interval = "" if low is None or high is None else f" ({low:.3g} to {high:.3g})"
            rows.append((name, f"{mean:.3g}{interval} at step {last.version.step}"))
    return rows
