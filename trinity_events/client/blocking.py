"""Blocking twins of the asynchronous calls, for code without an event loop or inside of one.

Each runs an event loop in a thread of its own, and blocks the calling thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from msgspec import Struct

from trinity_schemas import Kind, StepReady

from .. import subscriptions
from ..subscriptions import Delivered, Subscription
from ..subscriptions.subscription import SubscriptionNotOpen
from . import checkpoint_lease, ready_steps
from .ready_steps import ReadyCheckpoint

E = TypeVar("E", bound=Struct)

__all__ = [
    "BlockingSubscription",
    "hold_checkpoint",
    "newest_checkpoint",
    "subscribe",
    "wait_ready",
]


class BlockingSubscription(Generic[E]):
    """Subscription to a run: a context manager and iterator. Made by :func:`subscribe`."""

    def __init__(self, subscription: Subscription[E]) -> None:
        self._subscription = subscription
        self._exits = ExitStack()
        self._portal: BlockingPortal | None = None
        self._reading = anyio.Lock()

    def __enter__(self) -> BlockingSubscription[E]:
        with ExitStack() as exits:
            # A loop of its own: the caller may be inside of one, which must not be blocked.
            self._portal = exits.enter_context(start_blocking_portal())
            exits.enter_context(self._portal.wrap_async_context_manager(self._subscription))
            # Only now: an error above must end the portal's thread.
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        portal, self._portal = self._portal, None
        assert portal is not None
        with self._exits:
            # A read that Ctrl-C interrupted is cancelled, and must be over before the end.
            portal.call(self._reading.acquire)

    def __iter__(self) -> Iterator[Delivered[E]]:
        return self

    def __next__(self) -> Delivered[E]:
        """Return the next event; raise what the asynchronous subscription raises."""
        future = self._running.start_task_soon(self._next)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C interrupts this wait alone: without the cancel the read would take the next
            # event.
            future.cancel()
            raise

    async def _next(self) -> Delivered[E]:
        # Reads of an interrupted call and of the next one must not overlap.
        async with self._reading:
            return await anext(self._subscription)

    def ack(self, delivered: Delivered[E]) -> None:
        """Acknowledge an event to the group; without a group, do nothing."""
        self._running.call(delivered.ack)

    @property
    def _running(self) -> BlockingPortal:
        if self._portal is None:
            raise SubscriptionNotOpen("with")
        return self._portal


def subscribe(run: str, *types: type[E], **options: Any) -> BlockingSubscription[E]:
    """Subscribe as :func:`trinity_events.subscribe`, with its options.

    ::

        with blocking.subscribe("grpo-7b", StepReady, deadline=60) as events:
            for event in events:
                ...
    """
    return BlockingSubscription(subscriptions.subscribe(run, *types, **options))


@contextmanager
def hold_checkpoint(
    run: str,
    step: int,
    *,
    redis_url: str | None = None,
    checkpoint_root: Path | str | None = None,
    deadline: float = checkpoint_lease.PROMOTED,
    lease: float = checkpoint_lease.LEASE,
) -> Iterator[Path]:
    """Hold a lease as :func:`trinity_events.hold_checkpoint`.

    A lease that is lost raises at the end of the block, which a thread cannot cancel.
    """
    context = checkpoint_lease.hold_checkpoint(
        run,
        step,
        redis_url=redis_url,
        checkpoint_root=checkpoint_root,
        deadline=deadline,
        lease=lease,
    )
    with start_blocking_portal() as portal:
        holding: AbstractContextManager[Path] = portal.wrap_async_context_manager(context)
        with holding as folder:
            yield folder


def wait_ready(
    run: str,
    step: int,
    kind: Kind = "weights",
    *,
    epoch: int | None = None,
    deadline: float | None = None,
    redis_url: str | None = None,
) -> StepReady:
    """Wait as :func:`trinity_events.wait_ready`."""
    with start_blocking_portal() as portal:
        return portal.call(
            partial(
                ready_steps.wait_ready,
                *(run, step, kind),
                epoch=epoch,
                deadline=deadline,
                redis_url=redis_url,
            )
        )


def newest_checkpoint(
    run: str, *, redis_url: str | None = None, checkpoint_root: Path | str | None = None
) -> ReadyCheckpoint | None:
    """Return the newest checkpoint as :func:`trinity_events.newest_checkpoint`."""
    with start_blocking_portal() as portal:
        return portal.call(
            partial(
                ready_steps.newest_checkpoint,
                run,
                redis_url=redis_url,
                checkpoint_root=checkpoint_root,
            )
        )
