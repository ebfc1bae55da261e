"""The port that an event log implements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from msgspec import Struct

from trinity_schemas.identity import LONGEST_NAME

from .position import ORIGIN

# At least: `commit.lua` trims by whole nodes of the stream (MAXLEN ~), which costs less.
DEAD_LETTERS_KEPT = 10_000
"""Number of newest dead letters that a run keeps, at least; older ones are trimmed."""

DEAD_LETTER_BYTES = 16 << 10
"""Bytes that are kept of one dead letter. The log has the whole entry under its entry id."""
_REASON = 1000
"""Characters that are kept of a dead letter's reason."""

# A save that was suspended, or lost the first reply, can still read it. The key then expires.
GRANT_KEPT = 3600.0
"""Seconds for which a save can read its grant."""


class Stream(Enum):
    """The two streams of a run's log."""

    EVENTS = "events"
    """Events, which every process of the run publishes."""
    ANNOUNCEMENTS = "announcements"
    """Announcements, which the reducer alone writes and subscribers read."""


class Entry(NamedTuple):
    """One entry: its id, ``milliseconds-number`` by the server's clock, and its bytes."""

    id: str
    payload: bytes


class DeadLetter(NamedTuple):
    """An entry that could not be decoded or handled, with the reason."""

    entry: Entry
    reason: str

    @property
    def truncated(self) -> DeadLetter:
        """The dead letter as it is stored, cut to its size limits."""
        entry = Entry(self.entry.id, bytes(self.entry.payload[:DEAD_LETTER_BYTES]))
        return DeadLetter(entry, self.reason[:_REASON])


class Claimed(NamedTuple):
    """Entries that a group member took over, and entries that became dead letters."""

    entries: list[Entry]
    dead: list[Entry]


class GroupInfo(NamedTuple):
    """State of a consumer group."""

    name: str
    """Bytes that are no text appear as surrogates, as in file names: see :attr:`shown`."""
    pending: int
    """Number of entries that were delivered to a member and not acknowledged."""
    last_delivered: str
    """Position up to which entries were delivered to any member."""
    oldest_pending: str | None
    idle: float
    """Seconds since a member last read; since its creation if no member ever read."""
    members: int
    caught_up: bool
    """True if its members received and acknowledged every entry."""

    @property
    def printable_name(self) -> str:
        """The name as printable text: any client can create a group of any name."""
        text = self.name.encode(errors="surrogateescape").decode(errors="backslashreplace")
        return text[:LONGEST_NAME] or "(without a name)"


class CurrentAnnouncement(NamedTuple):
    """The last announcement of one subject, such as ``step-ready/weights``."""

    subject: str
    entry: Entry


class Commit(Struct, frozen=True, kw_only=True):
    """One step of the reducer, written whole or not at all.

    ``announcements`` pairs each payload with the subject of which it is the newest, if any.
    ``retracted`` names subjects without a current announcement. ``grants`` names the saves that
    may begin; the workers that wait for them are told at once.
    """

    token: int
    after: str
    position: str
    announcements: Sequence[tuple[str, bytes]] = ()
    retracted: Sequence[str] = ()
    grants: Sequence[str] = ()
    dead_letters: Sequence[DeadLetter] = ()
    snapshot: bytes | None = None


class Intake(Struct, frozen=True, kw_only=True):
    """Reports that the leading reducer moves into the events, whole or not at all.

    ``after`` and ``position`` are the positions in the reports before and after it. Refused
    reports become dead letters.
    """

    token: int
    after: str
    position: str
    accepted: Sequence[bytes] = ()
    refused: Sequence[DeadLetter] = ()


class ReportLog(Protocol):
    """Reports of a run's explorers, which are no part of its log until a reducer accepts them.

    A report stays until it is accepted or refused, and is removed then.
    """

    async def append_report(self, payload: bytes) -> str:
        """Append a report; return its entry id."""
        ...

    async def read_reports(self, after: str, *, seconds: float, limit: int) -> list[Entry]:
        """Return up to ``limit`` reports after a position; wait on the server for the first."""
        ...

    async def reports_position(self) -> str:
        """Return the position up to which reports were accepted or refused."""
        ...

    async def has_reports(self) -> bool:
        """Return True if there is a report that was neither accepted nor refused."""
        ...

    async def accept_reports(self, intake: Intake) -> bool:
        """Append accepted reports to the events; return False if another reducer leads."""
        ...

    async def renumber_reports(self, token: int, after: str) -> int | None:
        """Renumber reports as :meth:`EventLog.renumber` does events."""
        ...

    async def renumber_dead_letters(self, token: int) -> int | None:
        """Renumber all dead letters as :meth:`EventLog.renumber` does events."""
        ...


class EventLog(ReportLog, Protocol):
    """Log of one run.

    Positions are entry ids; reading begins after them. Methods raise the client's connection
    errors, which callers in this package convert to their own.
    """

    run_id: str

    async def append(self, payload: bytes) -> str:
        """Append an event; return its entry id."""
        ...

    async def read(
        self,
        after: str = ORIGIN,
        *,
        stream: Stream = Stream.EVENTS,
        limit: int = 1000,
        through: str = "+",
    ) -> list[Entry]:
        """Return up to ``limit`` entries after a position, up to and including ``through``."""
        ...

    async def read_blocking(
        self, after: dict[Stream, str], *, seconds: float, limit: int = 1000
    ) -> list[tuple[Stream, Entry]]:
        """Return the entries of one or both streams; wait on the server while there are none."""
        ...

    async def last_id(self, stream: Stream = Stream.EVENTS) -> str:
        """Return the position of the newest entry."""
        ...

    async def first_retained_id(self, stream: Stream) -> str | None:
        """Return the id of a trimmed stream's oldest entry; None if nothing was trimmed."""
        ...

    async def open_epoch(self, payload: Callable[[int], bytes]) -> int:
        """Take the next epoch and append its first event, in one script; return the epoch."""
        ...

    async def raise_epoch(self, token: int, epoch: int) -> int | None:
        """Raise the counter of epochs to ``epoch``; return the counter as it was.

        Return None, and change nothing, if ``token`` is not the newest leader's.
        """
        ...

    async def current_announcements(self) -> list[CurrentAnnouncement]:
        """Return the last announcement of every subject, in the order of the stream."""
        ...

    async def load(self) -> tuple[bytes | None, str]:
        """Return the reducer's last snapshot and its position."""
        ...

    async def commit(self, commit: Commit) -> bool:
        """Write a reducer's step; return False if another reducer leads or is further on."""
        ...

    async def append_leading(self, token: int, payload: bytes) -> str | None:
        """Append for the newest leader alone; return None if ``token`` is not its fence token."""
        ...

    async def renumber(self, token: int, after: str) -> int | None:
        """Give new ids to events with ids past year 9999; return their number.

        The order of the events stays. Return None if ``token`` is not the newest leader's. Nothing
        changes if ``after``, the last folded position, is itself such an id.
        """
        ...

    async def heartbeat_ttls(self, incarnations: Collection[str]) -> dict[str, float]:
        """Return the seconds left of each heartbeat that has not lapsed, by incarnation."""
        ...

    async def now(self) -> int:
        """Return the server's clock in milliseconds, the time part of entry ids."""
        ...

    async def notify_promoted(self) -> None:
        """Wake the readers that wait for a folder to get its final name."""
        ...

    async def promoted_after(self, after: str, *, seconds: float) -> str:
        """Return the position of the last promotion of a folder, once it is after a position.

        Return ``after`` if there is none within the time.
        """
        ...

    async def acquire_lease(self, step: int, who: str, seconds: float) -> bool:
        """Take or extend a lease on a checkpoint, which the reducer then does not delete.

        Return False if the checkpoint is being deleted. Only its folder tells if it exists.
        """
        ...

    async def release_lease(self, step: int, who: str) -> None:
        """Release the lease on a checkpoint."""
        ...

    async def mark_deleting(self, token: int, steps: Collection[int]) -> set[int]:
        """Mark the checkpoints without a lease for deletion; return their steps.

        Mark none if ``token`` is not the newest leader's.
        """
        ...

    async def clear_deleting(self, token: int, steps: Collection[int] | None = None) -> bool:
        """Clear the deletion marks of some steps, or of all; return False if another leads."""
        ...


class ConsumerGroup(Protocol):
    """Consumer groups of one run's log: each entry goes to one member of a group."""

    async def create_group(self, stream: Stream, group: str, after: str) -> None:
        """Create a group that begins after a position; leave an existing group as it is."""
        ...

    async def read_group(
        self, stream: Stream, group: str, member: str, *, seconds: float, limit: int = 100
    ) -> list[Entry]:
        """Give this member entries that no member was given yet; wait while there are none.

        A group with a waiting member is not idle, even if no entry comes.
        """
        ...

    async def claim(
        self, stream: Stream, group: str, member: str, *, idle: float, most: int, limit: int = 100
    ) -> Claimed:
        """Give this member the entries that stayed pending with any member for ``idle`` seconds.

        An entry that was delivered ``most`` times becomes a dead letter instead.
        """
        ...

    async def groups(self, stream: Stream) -> list[GroupInfo]:
        """Return every group of a stream."""
        ...

    async def destroy_group(self, stream: Stream, group: str, *, token: int) -> bool:
        """Remove a group from the log; return False if ``token`` is not the newest leader's."""
        ...

    async def forget_members(self, stream: Stream, group: str, idle: float) -> int:
        """Remove members with nothing pending that were idle for this many seconds.

        The member that read last stays, since it shows how long the group has been idle.
        """
        ...

    async def ack(self, stream: Stream, group: str, entry_id: str) -> None:
        """Acknowledge an entry to the group."""
        ...


class GroupedLog(EventLog, ConsumerGroup, Protocol):
    """Event log with consumer groups, as a subscription reads it."""
