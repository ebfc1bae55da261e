"""Wait for the version that veRL's trainer is about to publish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import anyio
import redis

from trinity_events.analysis.explain import explain
from trinity_events.errors import (
    DeadlineExceeded,
    TrinityError,
    VersionNotAnnounced,
)
from trinity_events.log import RedisEventLog, position
from trinity_events.replay import current_state
from trinity_events.server import connect
from trinity_events.subscriptions import Subscription, subscribe
from trinity_schemas import StepFailed, StepReady, StepSuperseded

from .topology import OpenedRun

Answer: TypeAlias = StepReady | StepFailed | StepSuperseded

_ASKING = 10.0
"""Maximum seconds for reading from the log what is missing."""


async def wait_for_version(
    redis_url: str, opened: OpenedRun, step: int | None, deadline: float
) -> StepReady:
    """Return the announcement of the version, once it is ready.

    Args:
        redis_url: URL of the log's server.
        opened: The run, and the position after which its entries count.
        step: Step of the version; None is the next version.
        deadline: Maximum seconds to wait.

    Raises:
        VersionUnavailable: if it was given up, or another version was published instead.
        DeadlineExceeded: if it was not ready in time; the message says what was missing.
    """
    awaited = f"weights of {'the next step' if step is None else f'step {step}'}"
    awaited += f" of run {opened.run_id}"
    with anyio.move_on_after(deadline):
        return await _receive_version(redis_url, opened, step, awaited)
    raise DeadlineExceeded(
        f"the {awaited} were not announced",
        deadline,
        await _format_missing(redis_url, opened, step),
    )


async def _receive_version(
    redis_url: str, opened: OpenedRun, step: int | None, awaited: str
) -> StepReady:
    is_later = _later_than(opened)
    events: Subscription[Any] = subscribe(
        opened.run_id,
        StepReady,
        StepFailed,
        StepSuperseded,
        # Not from now on: the version may have been announced before the rollout asks.
        start=opened.announced,
        redis_url=redis_url,
    )
    async with events:
        async for delivered in events:
            event: Answer = delivered.event
            if event.kind != "weights" or not is_later(event):
                continue
            if isinstance(event, StepReady):
                if step is None or event.step == step:
                    return event
                raise VersionNotAnnounced(awaited, fault="other step", step=event.step)
            if isinstance(event, StepSuperseded) and event.by.step == event.step:
                continue  # an abandoned attempt was superseded: the step is tried again
            if step is None or event.step == step:
                raise _not_announced(awaited, event)
    raise AssertionError("unreachable")


def _later_than(opened: OpenedRun) -> Callable[[Answer], bool]:
    """Return a filter for announcements that follow from later entries, not an earlier attempt."""
    since = position(opened.newest_entry)
    return lambda event: event.epoch >= opened.epoch and position(event.caused_by) > since


def _not_announced(awaited: str, event: StepFailed | StepSuperseded) -> VersionNotAnnounced:
    if isinstance(event, StepFailed):
        return VersionNotAnnounced(awaited, fault="failed", reason=event.reason)
    return VersionNotAnnounced(awaited, fault="superseded", step=event.by.step)


async def _format_missing(redis_url: str, opened: OpenedRun, step: int | None) -> str:
    look = (
        "check that a reducer and the trainer's rank 0 are running, with "
        f"trinity-events status {opened.run_id}"
    )
    if step is None:
        return look
    try:
        with anyio.fail_after(_ASKING):
            # Once: the deadline is over, and the error is to say what was missing.
            async with connect(redis_url, retry=False) as client:
                state = await current_state(RedisEventLog(client, opened.run_id))
    except (TrinityError, redis.RedisError, OSError, TimeoutError) as error:
        return f"the reason could not be read from the log ({error}): {look}"
    why = " ".join(explain(state, step).splitlines())
    return f"{why.rstrip('.')}: {look}"
