"""Rewards and pace of a run's trained steps, so small that every snapshot can have them.

1. Points are those of the lineage that is current: a resume drops those of later steps.
2. A point is the mean reward of ``stride`` steps, at the last of them; the newest may be of fewer.
3. There are fewer than :data:`.KEPT_REWARDS` points, whatever the number of steps: where one more
   would come, pairs become one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct, field

from .limits import KEPT_REWARDS, KEPT_STEP_TIMES

REWARDS = ("reward", "reward/mean")
"""Names of the mean reward among a step's metrics: the trainer's own, and veRL's."""


_SMOOTHED = 10
"""Steps of a mean that is shown as one number: the reward of one step is mostly noise."""


class RewardPoint(Struct, frozen=True, array_like=True):
    """Mean reward of some steps."""

    step: int
    """The last of them."""
    mean: float
    steps: int = 1
    """Number of them."""


class Learning(Struct, kw_only=True, omit_defaults=True):
    """Rewards and pace of the trained steps, as far as their events report them."""

    total_steps: int | None = None
    """Steps after which the run ends, if its configuration says so."""
    points: list[RewardPoint] = field(default_factory=list)
    """Mean rewards by step, oldest first."""
    stride: int = 1
    """Steps of a full point."""
    step_times: list[int] = field(default_factory=list)
    """Milliseconds of the last trained steps of the current epoch."""

    def begin_epoch(self, step: int, config: str | None) -> None:
        """Drop what the new epoch discards, and read the number of its steps."""
        self.points = [point for point in self.points if point.step <= step]
        self.step_times = []
        self.total_steps = _read_steps(config)

    def add(self, step: int, at: int, metrics: Mapping[str, float]) -> None:
        """Add a trained step, at some milliseconds."""
        # In place: a list of its own for each step would cost the fold more than the rest of this.
        if len(self.step_times) == KEPT_STEP_TIMES:
            del self.step_times[0]
        self.step_times.append(at)
        reward = next((metrics[name] for name in REWARDS if name in metrics), math.nan)
        if not math.isfinite(reward):
            return
        points = self.points
        if points and points[-1].steps < self.stride:
            points[-1] = _merge(points[-1], RewardPoint(step, reward))
            return
        points.append(RewardPoint(step, reward))
        if len(points) == KEPT_REWARDS:
            # Even, so that the newest point has a neighbour too.
            self.points = [_merge(*pair) for pair in zip(points[::2], points[1::2], strict=True)]
            self.stride *= 2

    @property
    def reward(self) -> float | None:
        """Return the mean reward of the last steps; None if no step reported one."""
        return _mean(self.points[::-1])

    @property
    def first_reward(self) -> float | None:
        """Return the mean reward of the first steps, of as many as those of :attr:`reward`."""
        return _mean(self.points)

    @property
    def seconds_per_step(self) -> float | None:
        """Return the mean seconds of the last steps; None before the second of an epoch."""
        times = self.step_times
        # Later ones alone: the clock of the server may have gone back.
        if len(times) < 2 or times[-1] <= times[0]:
            return None
        return (times[-1] - times[0]) / 1000 / (len(times) - 1)

    def seconds_left(self, step: int) -> float | None:
        """Return the seconds from a step to the last one, at the pace of the last steps."""
        pace = self.seconds_per_step
        if pace is None or self.total_steps is None:
            return None
        return max(0, self.total_steps - step) * pace


def _mean(points: Sequence[RewardPoint]) -> float | None:
    """Return the mean over the first points, of enough steps that it is no noise."""
    total, steps = 0.0, 0
    for point in points:
        total, steps = total + point.mean * point.steps, steps + point.steps
        if steps >= _SMOOTHED:
            break
    return total / steps if steps else None


def _merge(first: RewardPoint, second: RewardPoint) -> RewardPoint:
    steps = first.steps + second.steps
    mean = (first.mean * first.steps + second.mean * second.steps) / steps
    return RewardPoint(second.step, mean, steps)


class _Configuration(Struct):
    """The part of a configuration that says when a run ends."""

    steps: int | None = None


def _read_steps(config: str | None) -> int | None:
    """Return the number of steps of a configuration as JSON; None if it names none."""
    try:
        # Loops of users may put anything there.
        steps = None if config is None else msgspec.json.decode(config, type=_Configuration).steps
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    return steps if steps is not None and steps > 0 else None
