"""The append-only event log of a run: the port, Redis streams behind it, and those who write."""

from .base import (
    Commit,
    ConsumerGroup,
    DeadLetter,
    Entry,
    EventLog,
    GroupedLog,
    Standing,
    Stream,
)
from .index import list_runs, require_run, watch_runs
from .memory_log import MemoryEventLog
from .position import ORIGIN, before, position
from .publisher import AsyncPublisher, Publisher, new_producer, open_run, opening
from .redis_log import RedisEventLog
from .sync_log import SyncEventLog

__all__ = [
    "ORIGIN",
    "AsyncPublisher",
    "Commit",
    "ConsumerGroup",
    "DeadLetter",
    "Entry",
    "EventLog",
    "GroupedLog",
    "MemoryEventLog",
    "Publisher",
    "RedisEventLog",
    "Standing",
    "Stream",
    "SyncEventLog",
    "before",
    "list_runs",
    "new_producer",
    "open_run",
    "opening",
    "position",
    "require_run",
    "watch_runs",
]
