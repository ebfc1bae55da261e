"""Rules of checkpoints, the record and trackers: what rests on them needs them."""

from __future__ import annotations

from ...rules import OnlyWhen, Rule, is_any, is_positive, is_set

_WRITTEN = is_positive("checkpoints.interval")
_NONE = "{checkpoints.interval} 0 writes no checkpoints"

RULES: tuple[Rule, ...] = (
    OnlyWhen("checkpoints.save_hf_checkpoint checkpoints.keep checkpoints.mirror", _WRITTEN, _NONE),
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
        "tracking.folder tracking.project", is_set("tracking.trackers"), "there is no tracker"
    ),
)
