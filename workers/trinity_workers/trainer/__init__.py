"""The trainer: its loop, the wrapper around an engine, and the workers that it drives on Ray."""

from .backend import TrainEngineWrapper, UnusableBatch, group_by_prompt
from .backends import get_trainer_wrapper
from .trainer import Trainer, TrainingResult
from .upstream import get_latest_hf_checkpoint_path, is_verl_legacy

__all__ = [
    "TrainEngineWrapper",
    "Trainer",
    "TrainingResult",
    "UnusableBatch",
    "get_latest_hf_checkpoint_path",
    "get_trainer_wrapper",
    "group_by_prompt",
    "is_verl_legacy",
]
