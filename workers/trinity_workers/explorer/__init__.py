"""Explorer: answers rollout requests with fresh weights."""

from .explorer import ExplorationResult, Explorer

__all__ = ["ExplorationResult", "Explorer"]
