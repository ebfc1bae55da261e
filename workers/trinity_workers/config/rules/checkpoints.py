"""Rules of checkpoints, record, trackers, alarms and messages: what rests on them needs them."""

from __future__ import annotations

from ...rules import (
    Computed,
    Contradictions,
    OnlyWhen,
    Rule,
    Values,
    format_list,
    is_any,
    is_positive,
    is_set,
)

_WRITTEN = is_positive("checkpoints.interval")
_NONE = "{checkpoints.interval} 0 writes no checkpoints"


def _find_unknown_results(values: Values) -> Contradictions:
    chosen, sets = values["checkpoints.keep_best.set"], values["evaluation.sets"]
    if chosen is None:
        return
    if chosen not in sets:
        yield (
            ("checkpoints.keep_best.set", "evaluation.sets"),
            f"{{checkpoints.keep_best.set}} {chosen} is no set of {{evaluation.sets}}: name one of "
            f"{format_list(sorted(sets) or ['none'])}",
        )
        return
    # Those that an evaluation of the set publishes, and no others.
    metrics = ["mean", *(f"pass_at_{k}" for k in sets[chosen].passes)]
    if values["checkpoints.keep_best.metric"] not in metrics:
        yield (
            ("checkpoints.keep_best.metric",),
            f"{{checkpoints.keep_best.metric}} {values['checkpoints.keep_best.metric']} is no "
            f"result of the set {chosen}: name one of {format_list(metrics)}",
        )


RULES: tuple[Rule, ...] = (
    OnlyWhen("checkpoints.save_hf_checkpoint checkpoints.keep checkpoints.mirror", _WRITTEN, _NONE),
    OnlyWhen("checkpoints.keep_best.set checkpoints.notice", _WRITTEN, _NONE),
    OnlyWhen(
        "checkpoints.keep_best.metric checkpoints.keep_best.mode",
        is_set("checkpoints.keep_best.set"),
        "no set chooses the best checkpoint",
    ),
    Computed(_find_unknown_results),
    # Versions that are files are saves too, which the strategy limits.
    OnlyWhen("checkpoints.strategy", _WRITTEN | is_any("sync.method", "checkpoint"), _NONE),
    OnlyWhen(
        "record.groups_per_step",
        is_any("record.rollouts", "sample"),
        "only a sample of the rollouts is chosen",
    ),
    OnlyWhen(
        "record.max_bytes record.max_steps record.redact",
        is_any("record.rollouts", "sample", "all"),
        "no rollouts are recorded",
    ),
    OnlyWhen(
        "alarms.transfer_rate",
        is_any("trainer.colocated", False),
        "with {trainer.colocated} no weights travel",
    ),
    OnlyWhen(
        "notify.events notify.deadline",
        is_set("notify.webhook") | is_set("notify.command"),
        "nothing is notified",
    ),
    OnlyWhen(
        "tracking.folder tracking.project", is_set("tracking.trackers"), "there is no tracker"
    ),
)
