"""Policy of the leading reducer: deadlines, what it keeps, and its limits and timeouts."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from msgspec import Struct

from ..core.limits import KEPT_COMPLETE_CHECKPOINTS
from ..errors import TrinityError
from ..log import Stream
from ..log.page_size import PAGE_BYTES, TURN
from ..replay import PAGE

STEP_DEADLINE = 600.0
"""Seconds after its commit at which an incomplete step fails, by default."""
GROUP_IDLE = 86_400.0
"""Seconds without a read after which an idle group is detached, by default."""
KEEP_CHECKPOINTS = 2
"""Number of ready checkpoints to keep, by default."""


class InvalidPolicy(TrinityError):
    """A policy value is out of range.

    Attributes:
        option: Option that sets it.
        value: The value.
        fault: ``seconds`` if it is no deadline, ``negative`` or ``unknown`` for a number of
            checkpoints.
        limit: Number of the newest checkpoints that the state has.
    """

    option: str
    value: float
    fault: Literal["seconds", "negative", "unknown"]
    limit: int = 0
    texts: ClassVar = {
        "seconds": "{option} is {value:g}, but takes a number of seconds above 0: name a large one "
        "to wait for very long",
        "negative": "{option} is {value}, but takes how many of the newest checkpoints to keep: 2 "
        "or more keep that many, 0 keeps all",
        "unknown": "{option} is {value}, but the state knows of the newest {limit} alone: take as "
        "many or fewer, or 0 to keep all",
    }


class FoldLimits(Struct, frozen=True, kw_only=True):
    """Limits of the fold: what is read and folded at once, and when a snapshot is due.

    A new leader folds again what came after the last snapshot.

    Attributes:
        snapshot_entries: Entries after which the reducer writes a snapshot.
        snapshot_bytes: Bytes of entries after which it writes one.
        snapshot_seconds: Seconds of folding after which it writes one; the next leader repeats no
            more than that.
        batch_entries: Most entries of one batch; PageSize takes fewer large entries.
        turn_entries: Most entries folded before other tasks run; see
            :func:`~trinity_events.log.page_size.in_turns`.
        page_entries: Most entries of one read while the state is loaded.
        page_bytes: Most bytes of a batch, if its entries have the size of those before.
        unarchived_snapshots: Snapshots after which the reducer archives despite a backlog. From
            then on the fold is no faster than archiving, so that new entries do not fill the
            server. Entries that the server held at the start are folded first, because they take
            no further memory.
        late_entries: Most entries after the end of a run that count as late events of a closed run.
    """

    snapshot_entries: int = 5_000
    snapshot_bytes: int = 32 << 20
    snapshot_seconds: float = 1.0
    batch_entries: int = 2_000
    turn_entries: int = TURN
    page_entries: int = PAGE
    page_bytes: int = PAGE_BYTES
    unarchived_snapshots: int = 40
    late_entries: int = 100


class ArchiveLimits(Struct, frozen=True, kw_only=True):
    """Limits of the archive's segments, and of what stays on the server for followers.

    Attributes:
        segment_events: Most events of one segment.
        segment_announcements: Most announcements of one segment; they are larger than events, as
            they list their saves or parts.
        segment_bytes: Bytes after which a segment takes no further page; a segment is built in
            memory.
        server_events: Fewest events that stay on the server, for followers that are behind. A
            segment may hold a single entry, so a number of segments alone would not do.
        server_announcements: Fewest announcements that stay on the server.
        server_bytes: Bytes of segments in files whose entries are enough on the server, however
            few they are.
        segments_per_trim: Segments between two trims of a long backlog; a trim blocks the server.
        page_entries: Most events of one read; see :func:`~trinity_events.replay.page_of`.
        page_bytes: Most bytes of one read, if its entries have the size of those before.
    """

    segment_events: int = 5_000
    segment_announcements: int = 1_000
    segment_bytes: int = 32 << 20
    server_events: int = 5_000
    server_announcements: int = 1_000
    server_bytes: int = 64 << 20
    segments_per_trim: int = 10
    page_entries: int = PAGE
    page_bytes: int = PAGE_BYTES

    def segment_entries(self, stream: Stream) -> int:
        """Return the most entries of one segment of a stream."""
        return self.segment_events if stream is Stream.EVENTS else self.segment_announcements

    def server_entries(self, stream: Stream) -> int:
        """Return the fewest entries of a stream that stay on the server."""
        return self.server_events if stream is Stream.EVENTS else self.server_announcements


class ReducerTimeouts(Struct, frozen=True, kw_only=True):
    """Leases and periods of a leading reducer, in seconds.

    Attributes:
        leader_lease: Time without a renewal after which another reducer may lead.
        lease_check: Longest pause before a lapsed lease of a process is noticed, however long the
            leases are.
        reconcile_every: Period of comparing the files with an unchanged state.
        archive_retry: Time before failed archiving is tried again.
        fault_retry: Pause before a retry of a fault that a user must repair.
        retention_pause: Shortest pause between two checks for old checkpoints; a folded backlog
            has many ready steps.
        retention_every: Longest pause between two checks for old checkpoints; readers may release
            a checkpoint meanwhile.
        staged_grace: Time without a change after which a staged folder may be removed.
        restore_grace: Time before a folder that another leader moved to the trash is removed; that
            leader may restore it.
    """

    leader_lease: float = 3.0
    lease_check: float = 5.0
    reconcile_every: float = 1.0
    archive_retry: float = 10.0
    fault_retry: float = 5.0
    retention_pause: float = 1.0
    retention_every: float = 60.0
    staged_grace: float = 600.0
    restore_grace: float = 60.0


class Policy(Struct, frozen=True, kw_only=True):
    """Deadlines of the reducer, what it keeps, and its limits and timeouts.

    Users set the first four, by options of the command; the others are the same for every run.

    Attributes:
        step_deadline: Seconds after its commit at which an incomplete step fails.
        group_idle: Seconds without a read after which an idle consumer group is detached.
        keep_checkpoints: Number of the newest ready checkpoints to keep; 0 keeps all.
        adopt_folders: Runs whose folder is taken over if it belongs to another log.
        fold: Limits of the fold.
        archive: Limits of the archive and of what stays on the server.
        timeouts: Leases and periods of a leader.
    """

    step_deadline: float = STEP_DEADLINE
    group_idle: float = GROUP_IDLE
    keep_checkpoints: int = KEEP_CHECKPOINTS
    adopt_folders: frozenset[str] = frozenset()
    fold: FoldLimits = FoldLimits()
    archive: ArchiveLimits = ArchiveLimits()
    timeouts: ReducerTimeouts = ReducerTimeouts()

    def __post_init__(self) -> None:
        for name, seconds in (
            ("step-deadline", self.step_deadline),
            ("group-idle", self.group_idle),
        ):
            if not (math.isfinite(seconds) and seconds > 0):
                raise InvalidPolicy(f"--{name}", seconds, "seconds")
        if self.keep_checkpoints < 0:
            raise InvalidPolicy("--keep-checkpoints", self.keep_checkpoints, "negative")
        if self.keep_checkpoints > KEPT_COMPLETE_CHECKPOINTS:
            raise InvalidPolicy(
                "--keep-checkpoints", self.keep_checkpoints, "unknown", KEPT_COMPLETE_CHECKPOINTS
            )
