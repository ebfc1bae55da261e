"""The explorer: answers questions with the newest weights, and hands the answers on."""

from .explorer import ExplorationResult, Explorer

__all__ = ["ExplorationResult", "Explorer"]
