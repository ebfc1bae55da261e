"""Rollout engines: the port behind which a policy generates, and the engines that ship with it."""

from .base import (
    EngineOptions,
    Generation,
    GenerationRequest,
    NotServing,
    RolloutEngine,
    RolloutEngineError,
)
from .loading import load_engine

__all__ = [
    "EngineOptions",
    "Generation",
    "GenerationRequest",
    "NotServing",
    "RolloutEngine",
    "RolloutEngineError",
    "load_engine",
]
