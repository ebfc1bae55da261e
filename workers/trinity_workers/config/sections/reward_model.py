"""Section `reward`: a reward model, whose scores the trainer adds."""

from __future__ import annotations

from ...section import Section


class RewardConfig(Section, frozen=True, kw_only=True):
    """Reward model, whose scores the trainer adds to the rewards of the task."""

    model: str | None = None
    """Hugging Face folder of a model for sequence or token classification with one output. It may
    have another tokenizer than the policy."""
    weight: float = 1.0
    """Factor of its scores."""
