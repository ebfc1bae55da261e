"""Training engines: what holds the model and advances it."""

from .base import TrainEngine
from .fsdp import FSDPEngine

__all__ = ["FSDPEngine", "TrainEngine"]
