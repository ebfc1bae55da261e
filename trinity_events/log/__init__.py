"""Append-only event log of a run: the port, its implementations and the publishers."""

from .base import (
    DEAD_LETTER_BYTES,
    DEAD_LETTERS_KEPT,
    Claimed,
    Commit,
    ConsumerGroup,
    CurrentAnnouncement,
    DeadLetter,
    Entry,
    EventLog,
    GroupedLog,
    GroupInfo,
    Intake,
    ReportLog,
    Stream,
)
from .memory.event_log import MemoryEventLog
from .merged_reader import MergedReader, stream_order
from .page_size import PageSize
from .position import ORIGIN, before, position
from .publishing.async_publisher import AsyncPublisher, Resumption, open_run, opening_envelope
from .publishing.publisher import DEADLINE, Publisher, new_producer
from .publishing.status_leases import (
    STATUS_LEASE,
    renewing_explorer_lease,
    renewing_trainer_lease,
)
from .publishing.version_commits import commit_version
from .redis.event_log import RedisEventLog
from .redis.run_index import list_runs, require_run, watch_runs
from .redis.sync_log import SyncEventLog

__all__ = [
    "DEADLINE",
    "DEAD_LETTERS_KEPT",
    "DEAD_LETTER_BYTES",
    "ORIGIN",
    "STATUS_LEASE",
    "AsyncPublisher",
    "Claimed",
    "Commit",
    "ConsumerGroup",
    "CurrentAnnouncement",
    "DeadLetter",
    "Entry",
    "EventLog",
    "GroupInfo",
    "GroupedLog",
    "Intake",
    "MemoryEventLog",
    "MergedReader",
    "PageSize",
    "Publisher",
    "RedisEventLog",
    "ReportLog",
    "Resumption",
    "Stream",
    "SyncEventLog",
    "before",
    "commit_version",
    "list_runs",
    "new_producer",
    "open_run",
    "opening_envelope",
    "position",
    "renewing_explorer_lease",
    "renewing_trainer_lease",
    "require_run",
    "stream_order",
    "watch_runs",
]
