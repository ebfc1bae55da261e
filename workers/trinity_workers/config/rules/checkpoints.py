"""Rules of checkpoints: what rests on them needs them."""

from __future__ import annotations

from ..train_config import TrainConfig
from .base import Contradictions, FormatField


def check_checkpoints(config: TrainConfig, named: FormatField) -> Contradictions:
    """Yield what needs checkpoints where none is written."""
    if config.checkpoints.save_hf_checkpoint != "never" and not config.checkpoints.interval:
        interval, saved = named("checkpoints.interval"), named("checkpoints.save_hf_checkpoint")
        yield (
            ("checkpoints.save_hf_checkpoint", "checkpoints.interval"),
            f"{saved} is {config.checkpoints.save_hf_checkpoint}, and {interval} 0 writes no "
            f"checkpoints: set {interval}, or {saved} never",
        )
    if config.rollouts.keep_answers == "checkpoint" and not config.checkpoints.interval:
        interval, keep_answers = named("checkpoints.interval"), named("rollouts.keep_answers")
        yield (
            ("rollouts.keep_answers", "checkpoints.interval"),
            f"{keep_answers} is checkpoint, and {interval} 0 writes no checkpoints, so that no "
            f"answer would ever be deleted: set {interval}, or {keep_answers} trained",
        )
