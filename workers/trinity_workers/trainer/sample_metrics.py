"""Metrics of a step's samples that their ranks need not compute."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trinity_schemas import ExperienceHeader

_PARTS = 32
"""Named parts of a reward that are metrics, the first of a step by name; events are bounded."""


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
        **{
            f"reward_parts/{name}": statistics.fmean(parts[name]) for name in sorted(parts)[:_PARTS]
        },
    }
