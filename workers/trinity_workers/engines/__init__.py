"""Training engines, which hold and train the model."""

from .base import TrainEngine
from .fsdp import FSDPEngine
from .learning_rate import LearningRate

__all__ = ["FSDPEngine", "LearningRate", "TrainEngine"]
