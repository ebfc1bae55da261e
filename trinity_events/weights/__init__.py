"""Weight versions: published as verified chunks, pulled whole or not at all. Imports torch."""

from trinity_schemas import TransportName

from .applying.fit import Fit, check_fit
from .applying.install import adopt, install
from .applying.load import load_version
from .applying.verify_model import check_installed, model_digest
from .publishing.model_update import ModelUpdateGroup
from .publishing.publication import Publication
from .publishing.publish import PartWriter, PublishedPartReport
from .reading.model_folder import list_digests, pull_folder
from .reading.pull import pull_version
from .reading.pulled_version import PulledVersion, Selection
from .slices import ShardOffset, TensorSlice
from .synchronizer import Synchronizer
from .transports.base import ChunkStore, PartRef, PartSink, PartSource
from .transports.collective import CollectiveStore, WeightSyncInfo
from .transports.cuda import CudaStore
from .transports.ray import RayStore
from .transports.redis import RedisChunkStore
from .transports.shared_memory.store import SharedMemoryStore

__all__ = [
    "ChunkStore",
    "CollectiveStore",
    "CudaStore",
    "Fit",
    "ModelUpdateGroup",
    "PartRef",
    "PartSink",
    "PartSource",
    "PartWriter",
    "Publication",
    "PublishedPartReport",
    "PulledVersion",
    "RayStore",
    "RedisChunkStore",
    "Selection",
    "ShardOffset",
    "SharedMemoryStore",
    "Synchronizer",
    "TensorSlice",
    "TransportName",
    "WeightSyncInfo",
    "adopt",
    "check_fit",
    "check_installed",
    "install",
    "list_digests",
    "load_version",
    "model_digest",
    "pull_folder",
    "pull_version",
]
