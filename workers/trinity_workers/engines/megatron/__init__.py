"""A megatron-core engine around a Hugging Face causal language model."""

from .checkpoint import CheckpointFailed, CheckpointRefused
from .engine import DeviceRefused, MegatronEngine, OptimizerOptions
from .layout import LayoutRefused, ParallelLayout, leave
from .model import MODEL_TYPES, ModelOptions, UnsupportedModel
from .shards import LocalShard

__all__ = [
    "MODEL_TYPES",
    "CheckpointFailed",
    "CheckpointRefused",
    "DeviceRefused",
    "LayoutRefused",
    "LocalShard",
    "MegatronEngine",
    "ModelOptions",
    "OptimizerOptions",
    "ParallelLayout",
    "UnsupportedModel",
    "leave",
]
