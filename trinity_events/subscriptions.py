"""Subscriptions: what became true in a run, as an asynchronous iterator."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Generic, TypeVar

import anyio
from msgspec import Struct

from trinity_schemas import (
    ANNOUNCEMENT_TYPES,
    EVENT_TYPES,
    ContractError,
    Envelope,
    decode_envelope,
    event_tag,
)

from .errors import DeadlineExceeded
from .log import ORIGIN, Entry, GroupedLog, RedisEventLog, Stream, before, position
from .server import connect, serving

E = TypeVar("E", bound=Struct)

BLOCK = 5.0
"""Seconds that one read waits on the server; below the socket's own deadline."""
CLAIM_AFTER = 60.0
"""Seconds after which what a member of a group left pending is taken over by another."""


OpenLog = Callable[[], AbstractAsyncContextManager[GroupedLog]]
"""Opens the log that a subscription reads while it is entered."""


class Delivered(Generic[E]):
    """An event as a subscriber gets it; the event's fields can be read through it."""

    def __init__(
        self,
        entry_id: str,
        envelope: Envelope,
        event: E,
        ack: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.entry_id = entry_id
        """Its position, from which a subscription may start again."""
        self.envelope = envelope
        self.event = event
        self._ack = ack

    async def ack(self) -> None:
        """Tell the group that the event is dealt with; without a group, do nothing."""
        if self._ack is not None:
            await self._ack()

    def __getattr__(self, name: str) -> Any:
        if name == "event":  # not set yet, as while it is copied
            raise AttributeError(name)
        return getattr(self.event, name)

    def __repr__(self) -> str:
        return f"<{self.entry_id} {self.event!r}>"


class Subscription(Generic[E]):
    """Made by :func:`subscribe`: an asynchronous context manager and iterator."""

    def __init__(
        self,
        run: str,
        types: tuple[type[E], ...],
        *,
        start: str,
        group: str | None,
        open_log: OpenLog,
        deadline: float | None,
        claim_after: float,
    ) -> None:
        streams = {_stream_of(event_type) for event_type in types}
        if len(streams) != 1:
            raise ValueError(
                "subscribe to announcements or to events, not to both at once: "
                "they are two streams, and have no common order"
            )
        self._stream = streams.pop()
        self._types = types
        self._run = run
        self._start = start
        self._group = group
        self._open_log = open_log
        self._deadline = deadline
        self._claim_after = claim_after
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Subscription[E]:
        async with AsyncExitStack() as exits:
            self._log = await exits.enter_async_context(self._open_log())
            self._exits = exits.pop_all()
        self._iterator = self._followed() if self._group is None else self._grouped(self._group)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._iterator.aclose()  # type: ignore[attr-defined]
        await self._exits.aclose()

    def __aiter__(self) -> AsyncIterator[Delivered[E]]:
        return self._iterator

    async def _followed(self) -> AsyncIterator[Delivered[E]]:
        after = self._start
        if self._start == "current":
            after, standing = await self._standing()
            for entry in standing:
                delivered = self._deliver(entry)
                if delivered is not None:
                    yield delivered
            seen = {entry.id for entry in standing}
        else:
            after = ORIGIN if self._start == "beginning" else self._start
            seen = set()
        wait = _Wait(self._deadline, self._missing)
        while True:
            for entry in await self._next(after, wait):
                after = entry.id
                delivered = None if entry.id in seen else self._deliver(entry)
                if delivered is not None:
                    yield delivered
                    wait.renew()

    async def _standing(self) -> tuple[str, list[Entry]]:
        """The position to go on from, and what stands now, oldest first.

        The position is read first: what is announced in between is in both, and told once.
        """
        after = await self._log.last_id(self._stream)
        if self._stream is Stream.EVENTS:
            return after, []
        found = [one.entry for one in await self._log.standing()]
        return after, sorted(found, key=lambda entry: position(entry.id))

    async def _next(self, after: str, wait: _Wait) -> list[Entry]:
        while True:
            found = await self._log.wait({self._stream: after}, seconds=wait.slice())
            if found:
                return [entry for _, entry in found]

    async def _grouped(self, group: str) -> AsyncIterator[Delivered[E]]:
        member = f"member-{secrets.token_hex(4)}"
        await self._create_group(group)
        wait = _Wait(self._deadline, self._missing)
        while True:
            for entry in await self._read_group(group, member, wait):
                delivered = self._deliver(entry, self._acknowledge(group, entry.id))
                if delivered is not None:
                    yield delivered
                    wait.renew()
                else:
                    await self._log.ack(self._stream, group, entry.id)

    async def _create_group(self, group: str) -> None:
        start = {"beginning": ORIGIN}.get(self._start, self._start)
        if self._start == "current":
            last, standing = await self._standing()
            wanted = [entry for entry in standing if self._deliver(entry) is not None]
            # Just before the oldest of what stands, so that it is delivered too.
            start = before(wanted[0].id) if wanted else last
        await self._log.create_group(self._stream, group, start)

    async def _read_group(self, group: str, member: str, wait: _Wait) -> list[Entry]:
        while True:
            found = await self._log.claim_idle(
                self._stream, group, member, idle=self._claim_after
            ) or await self._log.read_group(
                self._stream, group, member, seconds=min(wait.slice(), self._claim_after)
            )
            if found:
                return found

    def _acknowledge(self, group: str, entry_id: str) -> Callable[[], Awaitable[None]]:
        async def ack() -> None:
            await self._log.ack(self._stream, group, entry_id)

        return ack

    def _deliver(
        self, entry: Entry, ack: Callable[[], Awaitable[None]] | None = None
    ) -> Delivered[E] | None:
        try:
            envelope = decode_envelope(entry.payload)
        except ContractError:
            return None  # the reducer puts it to the dead letters
        event = envelope.event
        if envelope.run_id != self._run or not isinstance(event, self._types):
            return None
        return Delivered(entry.id, envelope, event, ack)

    def _missing(self) -> str:
        tags = " or ".join(event_tag(one) for one in self._types)
        return f"no {tags} of run {self._run} came within {self._deadline:g} s"


def subscribe(
    run: str,
    *types: type[E],
    start: str = "current",
    group: str | None = None,
    redis_url: str | None = None,
    deadline: float | None = None,
    claim_after: float = CLAIM_AFTER,
) -> Subscription[E]:
    """Subscribe to a run's events of the given types.

    Without a group, a follower of one's own: it starts from ``"current"`` (the newest
    announcement of each kind, then what comes), ``"beginning"``, or a position (an entry id,
    exclusive). With a group, one logical consumer of any number of members: ``start`` counts
    when the group is created, each event goes to one member, and what a member did not ``ack()``
    goes to another after ``claim_after`` seconds: at least once.

    Args:
        run: The run's id. It need not be open yet.
        types: Event types, all announcements (``StepReady``...) or all events
            (``SaveStarted``...); none means all announcements.
        start: Where to begin.
        group: Name of a consumer group.
        redis_url: The server; without it ``TRINITY_REDIS_URL``, else the embedded one.
        deadline: Seconds to wait for the next event; None waits as long as it takes.
        claim_after: Seconds after which another member's pending events are taken over.

    Raises:
        DeadlineExceeded: from the iterator, when the deadline passes without an event.
        ServerUnreachable, ServerTooOld, InvalidUrl: on entering.
        ValueError: for a start or a mixture of types that makes no sense.
    """

    @asynccontextmanager
    async def open_log() -> AsyncIterator[GroupedLog]:
        with serving(redis_url) as url:
            async with connect(url) as client:
                yield RedisEventLog(client, run)

    return subscription_on(
        open_log,
        run,
        *types,
        start=start,
        group=group,
        deadline=deadline,
        claim_after=claim_after,
    )


def subscription_on(
    open_log: OpenLog,
    run: str,
    *types: type[E],
    start: str,
    group: str | None,
    deadline: float | None,
    claim_after: float,
) -> Subscription[E]:
    """As :func:`subscribe`, on a log of any kind."""
    if start not in ("current", "beginning"):
        try:
            position(start)
        except ValueError as error:
            raise ValueError(
                f'start at "current", at "beginning" or after an entry: {error}'
            ) from None
    for one in types:
        if one not in EVENT_TYPES:
            raise ValueError(f"{one.__name__} is not an event: see trinity_schemas.EVENT_TYPES")
    chosen: Any = types or ANNOUNCEMENT_TYPES
    return Subscription(
        run,
        chosen,
        start=start,
        group=group,
        open_log=open_log,
        deadline=deadline,
        claim_after=claim_after,
    )


def _stream_of(event_type: type[Struct]) -> Stream:
    return Stream.ANNOUNCEMENTS if event_type in ANNOUNCEMENT_TYPES else Stream.EVENTS


class _Wait:
    """Cuts a wait into slices that the socket's deadline allows."""

    def __init__(self, deadline: float | None, missing: Callable[[], str]) -> None:
        self._deadline = deadline
        self._missing = missing
        self.renew()

    def renew(self) -> None:
        """Begin anew: what was waited for came."""
        self._give_up = None if self._deadline is None else anyio.current_time() + self._deadline

    def slice(self) -> float:
        """Seconds to wait next. Raises DeadlineExceeded when there are none left."""
        if self._give_up is None:
            return BLOCK
        left = self._give_up - anyio.current_time()
        if left <= 0:
            raise DeadlineExceeded(self._missing())
        return min(left, BLOCK)
