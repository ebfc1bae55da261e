"""Transport through a collective group of the trainer's rank 0 and the explorers."""

from .rendezvous import WeightSyncInfo
from .store import TIMEOUT, CollectiveStore

__all__ = [
    "TIMEOUT",
    "CollectiveStore",
    "WeightSyncInfo",
]
