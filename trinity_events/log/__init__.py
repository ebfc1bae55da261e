"""The append-only event log of a run: the port, Redis streams behind it, and those who write."""

from .async_publisher import AsyncPublisher, open_run
from .base import (
    DEAD_LETTER_BYTES,
    DEAD_LETTERS_KEPT,
    Claimed,
    Commit,
    ConsumerGroup,
    DeadLetter,
    Entry,
    EventLog,
    GroupedLog,
    GroupInfo,
    Standing,
    Stream,
)
from .in_order import InOrder, in_order
from .index import list_runs, require_run, watch_runs
from .memory_log import MemoryEventLog
from .page_size import PageSize
from .position import ORIGIN, before, position
from .publisher import Publisher
from .redis_log import RedisEventLog
from .stamp import new_producer, opening
from .sync_log import SyncEventLog

__all__ = [
    "DEAD_LETTERS_KEPT",
    "DEAD_LETTER_BYTES",
    "ORIGIN",
    "AsyncPublisher",
    "Claimed",
    "Commit",
    "ConsumerGroup",
    "DeadLetter",
    "Entry",
    "EventLog",
    "GroupInfo",
    "GroupedLog",
    "InOrder",
    "MemoryEventLog",
    "PageSize",
    "Publisher",
    "RedisEventLog",
    "Standing",
    "Stream",
    "SyncEventLog",
    "before",
    "in_order",
    "list_runs",
    "new_producer",
    "open_run",
    "opening",
    "position",
    "require_run",
    "watch_runs",
]
