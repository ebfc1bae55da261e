"""Metrics of a step's samples and prompts that its ranks need not compute."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from trinity_events.core.alarms import (
    EMPTY_ANSWERS,
    EQUAL_REWARDS,
    INFRA_FAILED_RATE,
    REPEATED_ANSWERS,
    TRUNCATED_ANSWERS,
)
from trinity_events.core.reward_errors import REWARD_FAILED
from trinity_schemas import Experience, ExperienceHeader, ExperienceReference

from .rollouts.supply import FILTERED

_PARTS = 32
"""Named parts of a reward that are metrics, the first of a step by name; events are bounded."""


_FAILED = (REWARD_FAILED, "attempts")
"""Reasons of dropped prompts whose requests or rewards failed."""


def summarize_samples(samples: Sequence[ExperienceHeader]) -> dict[str, float]:
    """Return the spread of rewards and lengths, and the mean of each named part of the reward.

    A part that only some rewards have is the mean over these. ``score`` is a metric of its own.
    """
    lengths = [sum(sample.version_tokens.values()) for sample in samples]
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.reward_parts.items():
            if name != "score":
                parts.setdefault(name, []).append(value)
    return {
        "reward_std": statistics.pstdev(sample.reward for sample in samples),
        "response_length_min": float(min(lengths)),
        "response_length_max": float(max(lengths)),
        TRUNCATED_ANSWERS: statistics.fmean(not sample.finished for sample in samples),
        EMPTY_ANSWERS: statistics.fmean(
            sample.finished and length <= 1 for sample, length in zip(samples, lengths, strict=True)
        ),
        **_share_of_loops(samples),
        **{
            f"reward_parts/{name}": statistics.fmean(parts[name]) for name in sorted(parts)[:_PARTS]
        },
    }


def count_fates(
    groups: Sequence[Sequence[ExperienceHeader]], dropped: Mapping[str, int]
) -> dict[str, float]:
    """Return the shares of a step's prompts that taught nothing.

    Args:
        groups: Groups that the step was taken on.
        dropped: Prompts that were dropped since the step before, by reason.
    """
    filtered = dropped.get(FILTERED, 0)
    failed = sum(dropped.get(reason, 0) for reason in _FAILED)
    shares = {INFRA_FAILED_RATE: failed / (len(groups) + filtered + failed)}
    compared = [group for group in groups if len(group) > 1]
    if compared:
        equal = sum(len({sample.reward for sample in group}) == 1 for group in compared)
        shares[EQUAL_REWARDS] = (equal + filtered) / (len(compared) + filtered)
    return shares


def _share_of_loops(samples: Sequence[ExperienceHeader]) -> dict[str, float]:
    """Return the share of answers that end in a loop; nothing where no explorer has said it."""
    loops = [
        sample.ends_in_loop
        for sample in samples
        if isinstance(sample, Experience | ExperienceReference) and sample.ends_in_loop is not None
    ]
    return {REPEATED_ANSWERS: statistics.fmean(loops)} if loops else {}
