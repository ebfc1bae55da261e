"""Rules of LoRA adapters."""

from __future__ import annotations

from ...learning.lora_settings import ALL_LINEAR
from ...rules import Computed, Contradictions, OnlyWhen, Requires, Rule, Values, is_any, is_positive

_RANK = "model.lora.rank"
_ADAPTERS = is_positive(_RANK)


def _find_wrong_targets(values: Values) -> Contradictions:
    path = "model.lora.target_modules"
    targets = values[path]
    if not targets:
        yield (path,), f"{{{path}}} is empty: name layers, or write [{ALL_LINEAR}]"
    elif ALL_LINEAR in targets and len(targets) > 1:
        yield (
            (path,),
            f"{{{path}}} has {ALL_LINEAR} in addition to other names: keep it alone, or leave it "
            "out",
        )


RULES: tuple[Rule, ...] = (
    OnlyWhen(
        "model.lora.alpha model.lora.dropout model.lora.target_modules",
        _ADAPTERS,
        f"{{{_RANK}}} 0 has no adapters",
    ),
    Requires(
        _ADAPTERS,
        is_any("trainer.engine", "fsdp"),
        f"{{={_RANK}}} has adapters, which are trained on FSDP only",
        f"set {{trainer.engine}} fsdp, or {{{_RANK}}} 0",
    ),
    Computed(_find_wrong_targets),
)
