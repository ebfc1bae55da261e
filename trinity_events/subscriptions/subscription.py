"""Entry point of subscriptions: :func:`subscribe`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, ClassVar, Generic, Literal, TypeVar

from msgspec import Struct

from trinity_schemas import ANNOUNCEMENT_TYPES, EVENT_TYPES
from trinity_schemas.identity import LONGEST_NAME

from ..errors import StructuredError
from ..log import GroupedLog, RedisEventLog, position, require_run
from ..log.position import MalformedEntryId
from ..server import connect, serving
from .context import SubscriptionContext, SubscriptionFilter, SubscriptionTimeouts
from .delivered import Delivered
from .follower import follow
from .group_member import CLAIM_AFTER, MAX_DELIVERIES, GroupSettings, consume_group

E = TypeVar("E", bound=Struct)

OpenLog = Callable[[], AbstractAsyncContextManager[GroupedLog]]
"""Function that opens the log of a subscription, as an asynchronous context manager."""


class InvalidSubscription(StructuredError, ValueError):
    """The arguments of a subscription are invalid.

    Attributes:
        fault: The argument that is, or ``streams`` for types of two streams in one group.
        value: Value of the argument.
        length: Characters of the group's name.
        claim_after: Seconds after which an event is given to another member.
        max_deliveries: Number of times that an event is given.
    """

    fault: Literal["start", "type", "streams", "group", "deliveries"]
    value: object = None
    length: int = 0
    claim_after: float = 0.0
    max_deliveries: int = 0
    texts: ClassVar = {
        "start": 'start at "current", at "beginning" or after an entry: {value!r} is not an entry '
        "id such as 1700000000000-0",
        "type": "{value!r} is not an event: see trinity_schemas.EVENT_TYPES",
        "streams": "a consumer group reads announcements or events, not both: subscribe without a "
        "group, or once for each of them",
        "group": f"the name of a consumer group has 1 to {LONGEST_NAME} characters, but this one "
        "has {length}: choose another",
        "deliveries": "an event that is given {max_deliveries} times for {claim_after:g} s is "
        "never handled: max_deliveries must be at least 1, and claim_after above 0",
    }


class SubscriptionEnded(StructuredError, RuntimeError):
    """A subscription is read again after it has raised an error."""

    text = (
        "this subscription has ended with the error that it raised: subscribe again, from the last "
        "entry_id that you have"
    )


class SubscriptionNotOpen(StructuredError, RuntimeError):
    """A subscription is read before it is opened.

    Attributes:
        keyword: Keyword that opens it.
    """

    keyword: Literal["async with", "with"]
    text = "this subscription is not open: read it within {keyword} subscribe(...) as events"


class Subscription(Generic[E]):
    """Subscription to a run: an asynchronous context manager and iterator.

    Made by :func:`subscribe`.
    """

    def __init__(
        self,
        event_filter: SubscriptionFilter[E],
        start: str,
        group: GroupSettings | None,
        *,
        open_log: OpenLog,
        deadline: float | None,
        timeouts: SubscriptionTimeouts,
    ) -> None:
        self._filter = event_filter
        self._start = start
        self._group = group
        self._open_log = open_log
        self._deadline = deadline
        self._timeouts = timeouts
        self._exits = AsyncExitStack()
        self._iterator: AsyncIterator[Delivered[E]] | None = None
        self._reading: SubscriptionContext[E] | None = None

    def fault(self) -> str:
        """Return why the server could not be read, as a clause; empty if it could."""
        return "" if self._reading is None else self._reading.wait.format_fault()

    async def __aenter__(self) -> Subscription[E]:
        async with AsyncExitStack() as exits:
            log = await exits.enter_async_context(self._open_log())
            # Taken over only now: an opening that fails closes what it had opened.
            self._exits = exits.pop_all()
        self._reading = reading = SubscriptionContext(
            log, self._filter, self._deadline, self._timeouts
        )
        self._iterator = (
            follow(reading, self._start)
            if self._group is None
            else consume_group(reading, self._group)
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            # Before the log, which it may be reading.
            await self._iterator.aclose()  # type: ignore[union-attr]
        finally:
            await self._exits.aclose()

    def __aiter__(self) -> Subscription[E]:
        return self

    async def __anext__(self) -> Delivered[E]:
        if self._iterator is None:
            raise SubscriptionNotOpen("async with")
        try:
            return await anext(self._iterator)
        except StopAsyncIteration:
            # The iterator never ends without an error: a silent end would hide a loss.
            raise SubscriptionEnded() from None


def subscribe(
    run: str,
    *types: type[E],
    start: str = "current",
    group: str | None = None,
    wait_for_run: bool = False,
    redis_url: str | None = None,
    deadline: float | None = None,
    claim_after: float = CLAIM_AFTER,
    max_deliveries: int = MAX_DELIVERIES,
) -> Subscription[E]:
    """Subscribe to a run's events of the given types.

    Without a group, the subscriber is a follower, which gets every event. It starts from
    ``"current"`` (the newest announcement of each kind, then new ones), ``"beginning"`` (the
    oldest entry on the server), or a position (an entry id, exclusive).

    With a group, any number of members act as one consumer. ``start`` applies when the group is
    created. Each event goes to one member, and each member has one event at a time. An event
    without ``ack()`` within ``claim_after`` seconds goes to another member: delivery is at least
    once. ``claim_after`` must exceed the time that an event takes to handle. Otherwise two
    members handle the event of a slow one. After ``max_deliveries`` without an ``ack()`` the
    event becomes a dead letter of the run, and the group goes on.

    A subscription waits for a server that is away, as it waits for an event.

    Args:
        run: The run's id.
        types: Event types: announcements (``StepReady``...), events (``SaveStarted``...), or
            both, which come in the order of their ids, as ``tail`` prints them. None means all
            announcements. A group reads one of the two streams.
        start: The position or the word to start from.
        group: Name of a consumer group.
        wait_for_run: True to wait for a run that was not opened yet.
        redis_url: The server; without it ``TRINITY_REDIS_URL``, else the embedded one.
        deadline: Seconds to wait for the next event; None waits forever.
        claim_after: Seconds after which another member's pending events are taken over.
        max_deliveries: Deliveries after which an unacknowledged event becomes a dead letter.

    Raises:
        DeadlineExceeded: from the iterator, if the deadline passes without an event.
        LogLost: from the iterator, if entries that follow the last one, or ``start``, are
            gone: trimmed, or lost in a failover.
        GroupDetached: from the iterator, if the group was detached and may have missed events.
        RunNotFound: on entering, if the server has no such run; it names the nearest one.
        ServerUnreachable, ServerTooOld, InvalidUrl, PermissionDenied: on entering.
        ValueError: for an invalid start, mixture of types, or name of a group.
    """

    @asynccontextmanager
    async def open_log() -> AsyncIterator[GroupedLog]:
        with serving(redis_url) as url:
            # No hidden retries: after a fault the cursor checks that the log is the same.
            async with connect(url, retry=False) as client:
                log = RedisEventLog(client, run)
                if not wait_for_run and not await log.exists():
                    await require_run(
                        client,
                        run,
                        "give wait_for_run=True to wait until it is opened",
                    )
                yield log

    return subscription_on(
        open_log,
        run,
        *types,
        start=start,
        group=group,
        deadline=deadline,
        claim_after=claim_after,
        max_deliveries=max_deliveries,
    )


def subscription_on(
    open_log: OpenLog,
    run: str,
    *types: type[E],
    start: str,
    group: str | None,
    deadline: float | None,
    claim_after: float,
    max_deliveries: int = MAX_DELIVERIES,
    timeouts: SubscriptionTimeouts = SubscriptionTimeouts(),
) -> Subscription[E]:
    """Subscribe as :func:`subscribe`, on a log of any kind."""
    if start not in ("current", "beginning"):
        try:
            position(start)
        except MalformedEntryId:
            raise InvalidSubscription("start", start) from None
    for event_type in types:
        if event_type not in EVENT_TYPES:
            raise InvalidSubscription("type", event_type)
    streams = {event_type in ANNOUNCEMENT_TYPES for event_type in types}
    if group is not None and len(streams) > 1:
        raise InvalidSubscription("streams")
    if group is not None and not 1 <= len(group) <= LONGEST_NAME:
        raise InvalidSubscription("group", group, len(group))
    if max_deliveries < 1 or claim_after <= 0:
        raise InvalidSubscription(
            "deliveries", claim_after=claim_after, max_deliveries=max_deliveries
        )
    chosen: Any = types or ANNOUNCEMENT_TYPES
    return Subscription(
        SubscriptionFilter(run, chosen),
        start,
        None if group is None else GroupSettings(group, start, claim_after, max_deliveries),
        open_log=open_log,
        deadline=deadline,
        timeouts=timeouts,
    )
