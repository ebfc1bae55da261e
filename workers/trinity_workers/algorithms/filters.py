"""Groups that teach nothing."""

from __future__ import annotations

from collections.abc import Sequence

from trinity_schemas import ExperienceHeader

from .errors import RewardPartMissing
from .settings import FiltersConfig

EQUAL_WITHIN = 1e-6
"""Difference within which the rewards of a group are equal; above 1, as a share of the largest. It
is several roundings in float32, in which reward models compute."""


def is_informative(group: Sequence[ExperienceHeader], config: FiltersConfig) -> bool:
    """Return False for a group that dynamic sampling drops: all of its rewards are equal.

    Source: DAPO (arXiv 2503.14476) eq. 11, 0 < number of right answers < G. The named part of the
    reward is compared, if there is one. Rewards are equal within :data:`EQUAL_WITHIN`.

    Raises:
        AlgorithmError: if an experience does not have the named part.
    """
    if config.zero_variance != "resample":
        return True
    rewards = [_compared(experience, config.part) for experience in group]
    low, high = min(rewards), max(rewards)
    return high - low > EQUAL_WITHIN * max(1.0, abs(low), abs(high))


def _compared(experience: ExperienceHeader, part: str | None) -> float:
    if part is None:
        return experience.reward
    if part not in experience.reward_parts:
        raise RewardPartMissing(part, experience.ordinal, tuple(experience.reward_parts))
    return experience.reward_parts[part]
