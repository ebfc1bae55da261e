"""Presets: published algorithms as settings."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import msgspec

from .errors import AlgorithmSettingRefused, UnknownPreset
from .settings import AlgorithmConfig

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"normalisation": "sequence-mean"},
    "dr_grpo": {"scale": "none", "normalisation": "constant"},
    "dapo": {
        # Section 4.1 of the paper has this bound, and a buffer of 4,096 of 20,480 tokens.
        "clip_high": 0.28,
        "filters": {"zero_variance": "resample"},
        "overlong": {"buffer": 0.2},
    },
    "rloo": {
        "advantage": "rloo",
        "normalisation": "sequence-mean-token-sum",
        "kl": {"estimator": "k1", "where": "reward"},
    },
    "reinforce++": {"advantage": "reinforce++", "kl": {"estimator": "k1", "where": "reward"}},
    "reinforce++-baseline": {"advantage": "reinforce++-baseline", "kl": {"estimator": "k2"}},
    "ppo": {
        "advantage": "gae",
        "gae_lambda": 0.95,  # the paper's table 3
        "critic": {"use": True},
        "kl": {"estimator": "k1", "where": "reward"},
    },
    "gspo": {
        "loss": "gspo",
        "normalisation": "sequence-mean",
        # A response's ratio is a geometric mean, far nearer to 1 than that of a token.
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    # A clip of 1 below is none, since a ratio is above 0: CISPO bounds weights from above alone.
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "distillation": {"advantage": "teacher"},
    "supervised": {"advantage": "none", "loss": "supervised"},
}
"""Settings of each preset; all others have their defaults. docs/algorithms.md has the sources."""


def preset_values(name: str) -> dict[str, Any]:
    """Return the settings of a preset, nested. Raises UnknownPreset if there is none."""
    if name not in PRESETS:
        near = get_close_matches(str(name), PRESETS, n=1)
        raise UnknownPreset(str(name), near[0] if near else None, tuple(PRESETS))
    return PRESETS[name]


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values with others laid over them, section by section."""
    values = dict(below)
    for name, value in above.items():
        under = values.get(name)
        nested = isinstance(value, Mapping) and isinstance(under, Mapping)
        values[name] = merged(under, value) if nested else value  # type: ignore[arg-type]
    return values


def converted(values: Mapping[str, Any]) -> AlgorithmConfig:
    """Return nested values as settings. Raises AlgorithmSettingRefused."""
    try:
        return msgspec.convert(values, AlgorithmConfig)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        raise AlgorithmSettingRefused(f"algorithm{place.rstrip('`')}", reason) from None
