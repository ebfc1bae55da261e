"""Weight versions: published as verified chunks, pulled whole or not at all. Imports torch."""

from .base import ChunkStore, PartRef
from .install import check_fit, install
from .publish import PartWriter, PublishedPartReport
from .pull import PulledVersion, pull_version
from .redis_store import RedisChunkStore
from .synchronizer import Synchronizer

__all__ = [
    "ChunkStore",
    "PartRef",
    "PartWriter",
    "PublishedPartReport",
    "PulledVersion",
    "RedisChunkStore",
    "Synchronizer",
    "check_fit",
    "install",
    "pull_version",
]
