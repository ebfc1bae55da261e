"""Weights through a collective group of the trainer's rank 0 and the explorers."""

from .place import WeightSyncInfo
from .store import TIMEOUT, CollectiveStore
from .update import CollectiveGroups, ModelUpdateGroup

__all__ = [
    "TIMEOUT",
    "CollectiveGroups",
    "CollectiveStore",
    "ModelUpdateGroup",
    "WeightSyncInfo",
]
