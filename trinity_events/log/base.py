"""The port that an event log implements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from msgspec import Struct

from trinity_schemas.identity import LONGEST_NAME

from .position import ORIGIN

DEAD_LETTERS_KEPT = 10_000
"""The newest dead letters, at least so many of which a run keeps."""

DEAD_LETTER_BYTES = 16 << 10
"""What is kept of a dead letter's bytes: with their number this bounds them. The log has it whole,
under its entry id."""
_REASON = 1000
"""Characters that are kept of why it is one."""

GRANT_KEPT = 3600.0
"""Seconds for which a grant can be heard by the save that it was given to."""


class Stream(Enum):
    """The two streams of a run's log."""

    EVENTS = "events"
    """What everyone publishes."""
    ANNOUNCEMENTS = "announcements"
    """What the reducer alone writes, and subscribers listen to."""


class Entry(NamedTuple):
    """One entry: its id, ``milliseconds-number`` by the server's clock, and its bytes."""

    id: str
    payload: bytes


class DeadLetter(NamedTuple):
    """An entry that could not be decoded, and why."""

    entry: Entry
    reason: str

    @property
    def kept(self) -> DeadLetter:
        """As it is put to the dead letters: the beginning of it."""
        entry = Entry(self.entry.id, bytes(self.entry.payload[:DEAD_LETTER_BYTES]))
        return DeadLetter(entry, self.reason[:_REASON])


class Claimed(NamedTuple):
    """What a member of a group took over, and what was given up and put to the dead letters."""

    entries: list[Entry]
    dead: list[Entry]


class GroupInfo(NamedTuple):
    """How a consumer group stands."""

    name: str
    """Bytes of it that are no text are surrogates, as in names of files: see :attr:`shown`."""
    pending: int
    """Entries that were given to a member and not acknowledged."""
    last_delivered: str
    """The position up to which entries were given to anyone."""
    oldest_pending: str | None
    idle: float
    """Seconds since any member asked for anything; since it was created, before any did."""
    members: int
    caught_up: bool
    """True if its members were given every entry and have acknowledged them all."""

    @property
    def shown(self) -> str:
        """Its name as events and logs can tell it: anyone can create a group of any name."""
        text = self.name.encode(errors="surrogateescape").decode(errors="backslashreplace")
        return text[:LONGEST_NAME] or "(without a name)"


class CurrentAnnouncement(NamedTuple):
    """The last announcement of one subject, such as ``step-ready/weights``."""

    subject: str
    entry: Entry


class Commit(Struct, frozen=True, kw_only=True):
    """One step of the reducer, taken whole or not at all.

    ``announcements`` pairs each payload with the subject it is the newest of, if any;
    ``retracted`` names subjects of which nothing stands any more; ``grants`` names the saves
    whose turn has come, which those who wait for it are told at once.
    """

    token: int
    after: str
    position: str
    announcements: Sequence[tuple[str, bytes]] = ()
    retracted: Sequence[str] = ()
    grants: Sequence[str] = ()
    dead_letters: Sequence[DeadLetter] = ()
    snapshot: bytes | None = None


class EventLog(Protocol):
    """One run's log.

    Positions are entry ids; reading begins after them. Methods raise the client's connection
    errors, which the callers in this package turn into their own.
    """

    run_id: str

    async def append(self, payload: bytes) -> str:
        """Append to the events; returns the entry id."""
        ...

    async def read(
        self,
        after: str = ORIGIN,
        *,
        stream: Stream = Stream.EVENTS,
        limit: int = 1000,
        through: str = "+",
    ) -> list[Entry]:
        """Up to ``limit`` entries after a position, up to and with ``through``."""
        ...

    async def read_blocking(
        self, after: dict[Stream, str], *, seconds: float, limit: int = 1000
    ) -> list[tuple[Stream, Entry]]:
        """As :meth:`read` on one or both streams, waiting on the server for them."""
        ...

    async def last_id(self, stream: Stream = Stream.EVENTS) -> str:
        """The position of the newest entry."""
        ...

    async def first_retained_id(self, stream: Stream) -> str | None:
        """The oldest entry of a stream that has lost older ones; None when it is whole."""
        ...

    async def open_epoch(self, payload: Callable[[int], bytes]) -> int:
        """Take the next epoch and append its first event, in one script; returns the epoch."""
        ...

    async def current_announcements(self) -> list[CurrentAnnouncement]:
        """The last announcement of every subject."""
        ...

    async def load(self) -> tuple[bytes | None, str]:
        """The reducer's last snapshot and its position."""
        ...

    async def commit(self, commit: Commit) -> bool:
        """Write a reducer's step. False when another reducer leads or has gone further."""
        ...

    async def append_leading(self, token: int, payload: bytes) -> str | None:
        """As :meth:`append`, for the newest leader alone; None when ``token`` is not its."""
        ...

    async def renumber(self, token: int, after: str) -> int | None:
        """Give events whose ids no clock makes ids of the clock, in their order; returns how many.

        None when ``token`` is not the newest leader's. Nothing is changed where ``after``, up to
        which events were folded, is itself such an id.
        """
        ...

    async def heartbeat_ttls(self, incarnations: Collection[str]) -> dict[str, float]:
        """Those of them whose heartbeat has not lapsed, and in how many seconds it does."""
        ...

    async def now(self) -> int:
        """The server's clock in milliseconds, of which entry ids are made."""
        ...

    async def acquire_lease(self, step: int, who: str, seconds: float) -> bool:
        """Keep a checkpoint from being removed for a while; again, to keep it longer.

        False when it is being removed. Whether it is there at all, only its folder tells.
        """
        ...

    async def release_lease(self, step: int, who: str) -> None:
        """Let go of a checkpoint."""
        ...

    async def mark_deleting(self, token: int, steps: Collection[int]) -> set[int]:
        """Mark those of the checkpoints that nobody holds, for removal; returns which.

        None of them when ``token`` is not the newest leader's.
        """
        ...

    async def clear_deleting(self, token: int, steps: Collection[int] | None = None) -> bool:
        """Forget the marks, or all: they are removed, or will not be. False when another leads."""
        ...


class ConsumerGroup(Protocol):
    """The consumer groups of one run's log: each entry goes to one member of a group."""

    async def create_group(self, stream: Stream, group: str, after: str) -> None:
        """Create a group that begins after a position; one that is there stays as it is."""
        ...

    async def read_group(
        self, stream: Stream, group: str, member: str, *, seconds: float, limit: int = 100
    ) -> list[Entry]:
        """Give this member entries that no member was given yet, waiting for them.

        The group is not idle meanwhile, also where nothing comes.
        """
        ...

    async def claim(
        self, stream: Stream, group: str, member: str, *, idle: float, most: int, limit: int = 100
    ) -> Claimed:
        """Give this member what any member has left pending for ``idle`` seconds.

        What was given to members ``most`` times already is put to the dead letters instead.
        """
        ...

    async def groups(self, stream: Stream) -> list[GroupInfo]:
        """Every group of a stream."""
        ...

    async def destroy_group(self, stream: Stream, group: str, *, token: int) -> bool:
        """Let the log forget a group. False when ``token`` is not the newest leader's."""
        ...

    async def forget_members(self, stream: Stream, group: str, idle: float) -> int:
        """Forget members that have nothing pending and asked for nothing for so many seconds.

        The last one to ask stays: it tells how long the group has been idle.
        """
        ...

    async def ack(self, stream: Stream, group: str, entry_id: str) -> None:
        """Tell the group that an entry is dealt with."""
        ...


class GroupedLog(EventLog, ConsumerGroup, Protocol):
    """What a subscription needs of a log."""
