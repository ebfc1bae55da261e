"""Megatron-core engine around a Hugging Face causal language model."""

from ..base import LocalShard
from .base import MegatronModel, OptimizerOptions
from .checkpoint import CheckpointFailed
from .checkpoint_errors import (
    CheckpointRefused,
    MissingCheckpointFile,
    UndecodableFile,
    UnsafePickle,
)
from .engine import DeviceRefused, MegatronEngine
from .hybrid import HybridEngine
from .layout import LayoutRefused, ParallelLayout, leave
from .model import MODEL_TYPES, ModelOptions, UnsupportedModel
from .values import MegatronCritic, MegatronRewardModel

__all__ = [
    "MODEL_TYPES",
    "CheckpointFailed",
    "CheckpointRefused",
    "DeviceRefused",
    "HybridEngine",
    "LayoutRefused",
    "LocalShard",
    "MegatronCritic",
    "MegatronEngine",
    "MegatronModel",
    "MegatronRewardModel",
    "MissingCheckpointFile",
    "ModelOptions",
    "OptimizerOptions",
    "ParallelLayout",
    "UndecodableFile",
    "UnsafePickle",
    "UnsupportedModel",
    "leave",
]
