"""Pauses of an engine for a version, as events: one as it begins, and one as it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from trinity_schemas import GenerationPaused, GenerationResumed, PauseMode, StepRef

logger = logging.getLogger(__name__)


class PausePublisher(Protocol):
    """Publisher of pauses, which returns at once; a :class:`~trinity_events.log.Publisher`."""

    def publish(self, event: GenerationPaused | GenerationResumed, /) -> None:
        """Buffer the event."""
        ...


@dataclass
class Pause:
    """Pause that is under way; the engine records in it how the pause ends."""

    aborted: int = 0
    """Requests that it cut short."""
    serves: StepRef | None = None
    """Version that the engine serves if the block raises; None out of service."""


@contextmanager
def publish_pause(
    publisher: PausePublisher, version: StepRef, mode: PauseMode, in_flight: int, lease: float
) -> Iterator[Pause]:
    """Publish that an engine stands still for the block, and what it serves afterwards.

    Args:
        publisher: Publisher of the explorer.
        version: Version that is to be installed; it is served if the block does not raise.
        mode: Treatment of requests under way.
        in_flight: Requests that are under way.
        lease: Seconds after which the pause counts as over, in whatever state the explorer is.
    """
    pause = Pause()
    _publish(
        publisher,
        GenerationPaused(version=version, mode=mode, in_flight=in_flight, lease=lease),
    )
    # Out of service until the block has ended, whatever ends it.
    began, serves = time.monotonic(), None
    try:
        yield pause
        serves = version
    except BaseException:
        serves = pause.serves
        raise
    finally:
        seconds = time.monotonic() - began
        _publish(
            publisher,
            GenerationResumed(
                version=version, serves=serves, aborted=pause.aborted, seconds=seconds
            ),
        )


def _publish(publisher: PausePublisher, event: GenerationPaused | GenerationResumed) -> None:
    try:
        publisher.publish(event)
    except Exception as error:  # an event must not prolong, or end, the pause that it is about
        logger.warning("a pause was not reported: %s", error)
