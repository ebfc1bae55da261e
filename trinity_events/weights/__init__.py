"""Weight versions: published as verified chunks, pulled whole or not at all. Imports torch."""

from .base import ChunkStore, PartRef, PartSink, PartSource
from .boxes import Box, Place
from .install import Fit, adopt, check_fit, install
from .publish import PartWriter, PublishedPartReport
from .pull import PulledVersion, Wanted, pull_version
from .redis_store import RedisChunkStore
from .shared_memory import SharedMemoryStore
from .synchronizer import Synchronizer, TransportName

__all__ = [
    "Box",
    "ChunkStore",
    "Fit",
    "PartRef",
    "PartSink",
    "PartSource",
    "PartWriter",
    "Place",
    "PublishedPartReport",
    "PulledVersion",
    "RedisChunkStore",
    "SharedMemoryStore",
    "Synchronizer",
    "TransportName",
    "Wanted",
    "adopt",
    "check_fit",
    "install",
    "pull_version",
]
