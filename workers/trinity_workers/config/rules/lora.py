"""Rules of LoRA adapters."""

from __future__ import annotations

from ...learning.lora_settings import ALL_LINEAR
from ..train_config import TrainConfig
from .base import Contradictions, FormatField


def check_lora(config: TrainConfig, named: FormatField) -> Contradictions:
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
