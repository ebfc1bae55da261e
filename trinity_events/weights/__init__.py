"""Weight versions: published as verified chunks, pulled whole or not at all. Imports torch."""

from .base import ChunkStore, PartRef, PartSink, PartSource
from .boxes import Box, Place
from .collective import CollectiveStore, ModelUpdateGroup, WeightSyncInfo
from .install import Fit, adopt, check_fit, install
from .load import load_version
from .publish import PartWriter, PublishedPartReport
from .pull import PulledVersion, Wanted, pull_version
from .ray_store import RayStore
from .redis_store import RedisChunkStore
from .shared_memory import SharedMemoryStore
from .synchronizer import Synchronizer, TransportName

__all__ = [
    "Box",
    "ChunkStore",
    "CollectiveStore",
    "Fit",
    "ModelUpdateGroup",
    "PartRef",
    "PartSink",
    "PartSource",
    "PartWriter",
    "Place",
    "PublishedPartReport",
    "PulledVersion",
    "RayStore",
    "RedisChunkStore",
    "SharedMemoryStore",
    "Synchronizer",
    "TransportName",
    "Wanted",
    "WeightSyncInfo",
    "adopt",
    "check_fit",
    "install",
    "load_version",
    "pull_version",
]
