"""Settings of LoRA adapters; without torch."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from ..section import Section

ALL_LINEAR = "all-linear"
"""Stands for every linear layer but the output head."""


class LoraConfig(Section, frozen=True, kw_only=True):
    """LoRA: adapters of the policy, which are trained in its place."""

    rank: Annotated[int, Meta(ge=0)] = 0
    """Rank of the adapters, such as 16. 0 has none, and trains the policy itself."""
    alpha: Annotated[float, Meta(gt=0)] | None = None
    """The product of an adapter's matrices counts alpha / rank times. Null is twice the rank."""
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that are dropped while it is trained."""
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """Names of the layers that have adapters, such as `[q_proj, v_proj]`; `[all-linear]` is every
    linear layer but the output head."""

    @property
    def scaled_alpha(self) -> float:
        """Return alpha, also where it is left out."""
        return self.alpha or 2.0 * self.rank
