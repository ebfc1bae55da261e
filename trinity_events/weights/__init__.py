"""Weight versions: published as verified chunks, pulled whole or not at all. Imports torch."""

from .base import ChunkStore, PartRef, PartSink, PartSource
from .collective import CollectiveStore, ModelUpdateGroup, WeightSyncInfo
from .install import check_fit, install
from .publish import PartWriter, PublishedPartReport
from .pull import PulledVersion, pull_version
from .ray_store import RayStore
from .redis_store import RedisChunkStore
from .shared_memory import SharedMemoryStore
from .synchronizer import Synchronizer, TransportName

__all__ = [
    "ChunkStore",
    "CollectiveStore",
    "ModelUpdateGroup",
    "PartRef",
    "PartSink",
    "PartSource",
    "PartWriter",
    "PublishedPartReport",
    "PulledVersion",
    "RayStore",
    "RedisChunkStore",
    "SharedMemoryStore",
    "Synchronizer",
    "TransportName",
    "WeightSyncInfo",
    "check_fit",
    "install",
    "pull_version",
]
