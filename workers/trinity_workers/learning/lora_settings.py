"""Settings of LoRA adapters, and the contradictions in them; without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from ..section import Section

if TYPE_CHECKING:
    from ..config.train_config import TrainConfig

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


def contradictions(
    config: TrainConfig, named: Callable[[str], str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield contradictions of the adapters' settings: the fields' paths, and a sentence.

    Args:
        config: The run.
        named: Names a field, given by its path, in the sentences.
    """
    lora, rank = config.model.lora, named("model.lora.rank")
    if not lora.rank:
        given = [field for field in ("alpha", "dropout") if getattr(lora, field)]
        given += ["target_modules"] * (lora.target_modules != (ALL_LINEAR,))
        for field in given:
            yield (
                (f"model.lora.{field}", "model.lora.rank"),
                f"{named(f'model.lora.{field}')} is set, and {rank} 0 has no adapters: set {rank}, "
                "or leave it out",
            )
        return
    if config.trainer.engine != "fsdp":
        engine = named("trainer.engine")
        yield (
            ("model.lora.rank", "trainer.engine"),
            f"{rank} is {lora.rank}, and adapters are trained on FSDP only: set {engine} fsdp, or "
            f"{rank} 0",
        )
    targets = named("model.lora.target_modules")
    if not lora.target_modules:
        yield (
            ("model.lora.target_modules",),
            f"{targets} is empty: name layers, or write [{ALL_LINEAR}]",
        )
    elif ALL_LINEAR in lora.target_modules and len(lora.target_modules) > 1:
        yield (
            ("model.lora.target_modules",),
            f"{targets} has {ALL_LINEAR} beside other names: keep it alone, or leave it out",
        )
