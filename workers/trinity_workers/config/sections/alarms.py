"""Section `alarms`: thresholds of measurements of training."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ...section import Section

Share = Annotated[float, Meta(gt=0, le=1)]
Ratio = Annotated[float, Meta(gt=0)]


# Far from what healthy runs measure: tests/core/test_healthy_runs.py replays their recorded steps
# without an alarm.
class AlarmsConfig(Section, frozen=True, kw_only=True):
    """Thresholds beyond which an alarm is raised. `null` turns an alarm off."""

    stalled_step: Annotated[float, Meta(gt=1)] | None = 10.0
    """Time of a step that is under way, in medians of the last 20 steps. No step below 60 seconds
    raises it."""
    equal_rewards: Share | None = 0.98
    """Share of a step's groups whose rewards are all the same, with those that a filter drops."""
    truncated_answers: Share | None = 0.9
    """Share of a step's answers that met their limit of tokens."""
    empty_answers: Share | None = 0.2
    """Share of a step's answers that end with their first token."""
    repeated_answers: Share | None = 0.2
    """Share of a step's answers that end in a loop of tokens."""
    entropy_collapse: Share | None = 0.05
    """Entropy of the answers as a share of that of the first ten steps, while the reward is no
    higher than it was then."""
    reward_parts_apart: Ratio | None = 2.0
    """Shift by which one part of the reward rises and another one falls, from the mean of 20 steps
    to that of the next 20, in standard deviations within these."""
    infra_failed_rate: Share | None = 0.2
    """Share of a step's prompts that were dropped because requests or rewards failed."""
    # No default: what a network can do differs by orders of magnitude.
    transfer_rate: Ratio | None = None
    """Bytes a second at which an explorer gets weights, at least."""
