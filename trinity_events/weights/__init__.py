"""Weight versions: published as verified chunks, pulled whole or not at all. Imports torch."""

from .boxes import Box, Place
from .install import Fit, adopt, check_fit, install
from .load import load_version
from .proof import check_installed
from .publish import PartWriter, PublishedPartReport
from .pull import pull_version
from .synchronizer import Synchronizer
from .transports.base import ChunkStore, PartRef, PartSink, PartSource
from .transports.collective import CollectiveStore, ModelUpdateGroup, WeightSyncInfo
from .transports.cuda import CudaStore
from .transports.ray import RayStore
from .transports.redis import RedisChunkStore
from .transports.shared_memory import SharedMemoryStore
from .transports.stores import TransportName
from .version import PulledVersion, Wanted

__all__ = [
    "Box",
    "ChunkStore",
    "CollectiveStore",
    "CudaStore",
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
    "check_installed",
    "install",
    "load_version",
    "pull_version",
]
