"""Context of one subscription: the log it reads, its filter and its deadline."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from msgspec import Struct

from trinity_schemas import ANNOUNCEMENT_TYPES, ContractError, decode_envelope, event_tag

from ..log import Entry, GroupedLog, Stream
from ..server import Deadline
from .delivered import Delivered

E = TypeVar("E", bound=Struct)


class SubscriptionTimeouts(Struct, frozen=True, kw_only=True):
    """Timeouts of a subscription that no subscriber needs to set, in seconds.

    Attributes:
        read: Longest wait of one read on the server; below the socket's deadline.
        forget_after: Time after which an idle member with nothing pending is removed from its
            group.
    """

    read: float = 5.0
    forget_after: float = 3600.0


class SubscriptionFilter(Generic[E]):
    """Filter for the events that a subscriber asked for."""

    def __init__(self, run: str, types: tuple[type[E], ...]) -> None:
        streams = {_stream_of(event_type) for event_type in types}
        self.run = run
        self.types = types
        self.streams = tuple(stream for stream in Stream if stream in streams)

    @property
    def tags(self) -> str:
        """The names of the event types, for a sentence."""
        return " or ".join(event_tag(event_type) for event_type in self.types)

    def deliver(
        self, entry: Entry, ack: Callable[[], Awaitable[None]] | None = None
    ) -> Delivered[E] | None:
        """Return the entry as the subscriber gets it; None if the filter rejects it."""
        try:
            envelope = decode_envelope(entry.payload)
        except ContractError:
            return None  # the reducer makes it a dead letter
        event = envelope.event
        if envelope.run_id != self.run or not isinstance(event, self.types):
            return None
        return Delivered(entry.id, envelope, event, ack)


class SubscriptionContext(Generic[E]):
    """Log, filter and deadline of an open subscription."""

    def __init__(
        self,
        log: GroupedLog,
        event_filter: SubscriptionFilter[E],
        deadline: float | None,
        timeouts: SubscriptionTimeouts,
    ) -> None:
        self.log = log
        self.timeouts = timeouts
        self.filter = event_filter
        self.streams = event_filter.streams
        self.deadline = deadline
        self.wait = Deadline(
            deadline,
            f"no {event_filter.tags} of run {event_filter.run} came",
            f"see trinity-events status {event_filter.run}",
        )

    def block(self) -> float:
        """Return the seconds that the next read may wait on the server."""
        return min(self.wait.left(), self.timeouts.read)

    @property
    def stream(self) -> Stream:
        """The one stream that a member of a group reads."""
        [stream] = self.streams
        return stream

    async def current_announcements(self) -> tuple[dict[Stream, str], list[Entry]]:
        """Return the positions to read from, and the current announcements, oldest first.

        The positions are read first. An announcement in between is found in both, and the caller
        delivers it once.
        """
        after = {stream: await self.log.last_id(stream) for stream in self.streams}
        if Stream.ANNOUNCEMENTS not in self.streams:
            return after, []
        current = await self.log.current_announcements()
        return after, [announcement.entry for announcement in current]


def _stream_of(event_type: type[Struct]) -> Stream:
    return Stream.ANNOUNCEMENTS if event_type in ANNOUNCEMENT_TYPES else Stream.EVENTS
