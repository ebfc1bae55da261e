"""The one face that workers and trainers use for saves."""

from .coordinator import CheckpointCoordinator
from .staging import staged_path

__all__ = ["CheckpointCoordinator", "staged_path"]
