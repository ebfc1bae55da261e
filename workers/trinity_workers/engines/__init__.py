"""Training engines, which hold and train the model."""

from .base import TrainEngine
from .fsdp import FSDPEngine

__all__ = ["FSDPEngine", "TrainEngine"]
