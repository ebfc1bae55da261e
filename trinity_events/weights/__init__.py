"""Weight versions: published as verified chunks, pulled whole or not at all. Imports torch."""

from trinity_schemas import TransportName

from ..checkpoints.digest_list import list_digests
from .applying.install import Fit, adopt, check_fit, install
from .applying.load import load_version
from .applying.verify_model import check_installed, make_proof, model_digest
from .publishing.part_writer import PartWriter, PublishedPartReport
from .publishing.publication import ModelUpdateGroup, Publication
from .reading.model_folder import pull_folder
from .reading.pull import PulledVersion, Selection, pull_version
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
    "make_proof",
    "model_digest",
    "pull_folder",
    "pull_version",
]
