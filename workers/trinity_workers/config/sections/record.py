"""Section `record`: record of rollouts."""

from __future__ import annotations

from typing import Literal

from ...section import Section
from ..types import Positive


class RecordConfig(Section, frozen=True, kw_only=True):
    """Record of the rollouts that were trained on, and of those that were not, next to the log."""

    rollouts: Literal["sample", "all", "none"] = "sample"
    """Samples that are recorded. `sample` takes some groups of each step and never holds training
    up: what its queue has no room for is dropped and counted. `all` takes every sample, and a step
    ends once its samples are on disk. `none` records nothing."""
    groups_per_step: Positive = 64
    """Groups of a step that each rank records with `sample`: spread over the order of their mean
    rewards, so that the best and the worst one are among them. As many groups are recorded
    that no step trains on: the first ones that come for each step."""
    max_bytes: Positive = 2**30
    """Bytes of the record on all ranks together. The oldest steps are removed first, and reported
    as the metric `record/removed_steps`."""
    max_steps: Positive = 1000
    """Steps of the record. The oldest ones are removed first."""
    redact: str | None = None
    """Function that returns the text to record in the place of a text, `module:attribute` or
    `./file.py:attribute`. Tokens of a text that it changes are left out."""
