"""The trainer: its loop, the wrapper around an engine, and the workers that it drives on Ray."""

from .trainer import Trainer, TrainingResult
from .wrapper import TrainEngineWrapper, get_trainer_wrapper

__all__ = ["TrainEngineWrapper", "Trainer", "TrainingResult", "get_trainer_wrapper"]
