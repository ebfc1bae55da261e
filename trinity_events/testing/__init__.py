"""In-memory pipeline for unit tests of its users, without a server and without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..log.memory.event_log import MemoryEventLog, SyncMemoryEventLog
    from .history import RecordedHistory
    from .pipeline import Pipeline

__all__ = ["MemoryEventLog", "Pipeline", "RecordedHistory", "SyncMemoryEventLog"]

_HOMES = {
    "MemoryEventLog": "..log.memory.event_log",
    "Pipeline": ".pipeline",
    "RecordedHistory": ".history",
    "SyncMemoryEventLog": "..log.memory.event_log",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: pytest loads the plugin beside this in every session.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
