"""Rollout engines by name: those that ship, and entry points."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..tasks.objects import load_object
from .base import EngineOptions, RolloutEngine

ENGINES = {"huggingface": "trinity_workers.rollout_engines.huggingface:HuggingFaceEngine.open"}
"""Engines that ship with this package."""
GROUP = "trinity_events.rollout_engines"
"""Group of entry points under which packages offer engines: functions of :class:`EngineOptions`."""


def load_engine(name: str, options: EngineOptions, *, folder: Path = Path()) -> RolloutEngine:
    """Return a rollout engine. Raises TaskError if there is none of that name.

    Args:
        name: An engine that ships, an entry point, `module:attribute` or `./file.py:attribute`.
        options: Options of the engine.
        folder: Directory that a relative name starts from.
    """
    return find_engine(name, folder=folder)(options)


def find_engine(name: str, *, folder: Path = Path()) -> Callable[[EngineOptions], RolloutEngine]:
    """Return the function that makes an engine; arguments and errors as :func:`load_engine`."""
    make: Callable[[EngineOptions], RolloutEngine] = load_object(
        name, kind="rollout engine", group=GROUP, built_in=ENGINES, folder=folder
    )
    return make
