"""Section `checkpoints`: checkpoints of the training state."""

from __future__ import annotations

from typing import Literal

from trinity_events.checkpoints.verification import VerifyMode
from trinity_schemas import SaveStrategy

from ...section import Section
from ..types import NotNegative, Seconds

OnDamage = Literal["stop", "previous"]


class KeepBestConfig(Section, frozen=True, kw_only=True):
    """Best checkpoint, by an evaluation, which no newer one removes."""

    set: str | None = None
    """Evaluation set whose results choose the best checkpoint, which stays until a better one is
    complete. A step counts that is both evaluated and saved. Null keeps none for it."""
    metric: str = "mean"
    """Result of the set: `mean`, or `pass_at_K`."""
    mode: Literal["max", "min"] = "max"
    """Direction of what is better."""


class CheckpointsConfig(Section, frozen=True, kw_only=True):
    """Checkpoints of the training state."""

    interval: NotNegative = 100
    """Steps between two checkpoints, and one after the last step; 0 writes none."""
    keep: NotNegative = 2
    """Number of the newest ready checkpoints to keep; 0 keeps all. A reducer that the command does
    not start has its own. Trinity-RFT's name max_checkpoints_to_keep is read too; there, 0 is the
    default."""
    save_hf_checkpoint: Literal["never", "last", "always"] = "never"
    """Checkpoints whose model is a Hugging Face folder with weights, which other programs load and
    a resume too: none, that of the last step, or all. Trinity-RFT's default is last."""
    keep_best: KeepBestConfig = KeepBestConfig()
    strategy: SaveStrategy = "unrestricted"
    """Strategy that limits concurrent saves."""
    root: str | None = None
    """Folder with one checkpoint directory per run. Null is `checkpoints` below TRINITY_HOME."""
    notice: Seconds | None = None
    """Seconds from SIGTERM or SIGUSR2, such as Slurm's warning, until the job is killed: within
    them a checkpoint of the last step is saved. Null saves on SIGUSR2, within 60 s, and ends at
    once on SIGTERM."""
    mirror: str | None = None
    """URL of object storage for fsspec, such as `s3://bucket/path`. Each ready checkpoint is copied
    there, and a resume fetches one that is not below `root`. Null copies none."""
    verify: VerifyMode = "full"
    """Comparison of a checkpoint with its manifest before a resume loads it: sizes and digests,
    sizes alone, or none."""
    # An older checkpoint costs steps, so that it is taken only if the user asks (decision 37).
    on_damage: OnDamage = "stop"
    """Treatment of a damaged or missing newest checkpoint at a resume: stop names the newest older
    one that is whole, and previous continues from it."""
