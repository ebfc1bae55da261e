"""Rollout engines: the port behind which a policy generates, and the engines that ship with it."""

from .base import (
    EngineEnded,
    EngineOptions,
    Generation,
    GenerationRequest,
    NotServing,
    RolloutEngine,
    RolloutEngineError,
)
from .loading import load_engine, samples_with, updates_amid_turns

__all__ = [
    "EngineEnded",
    "EngineOptions",
    "Generation",
    "GenerationRequest",
    "NotServing",
    "RolloutEngine",
    "RolloutEngineError",
    "load_engine",
    "samples_with",
    "updates_amid_turns",
]
