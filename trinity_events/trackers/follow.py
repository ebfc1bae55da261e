"""Feeding trackers from a run's log: never in the way of the run."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, Mapping
from contextlib import suppress

from anyio import to_thread

from trinity_schemas import (
    ContractError,
    EnvelopeReader,
    PhasesMeasured,
    RunClosed,
)

from ..analysis.metrics import MEASURED, MetricsReader, StepMetrics
from ..log import Entry
from ..subscriptions import subscribe
from .base import Tracker

logger = logging.getLogger(__name__)


async def track_live(
    run_id: str, epoch: int, trackers: Mapping[str, Tracker], *, redis_url: str
) -> None:
    """Give trackers the metrics of one epoch as they come, until it is closed.

    A tracker that fails is told of once, and gets nothing more; the others go on.
    """
    reader, feed = MetricsReader(), _Feed(trackers)
    # From the beginning: the epoch was opened before its trackers were.
    async with subscribe(run_id, *MEASURED, start="beginning", redis_url=redis_url) as events:
        async for delivered in events:
            # Explorers outlive epochs: their reports have the epoch in which they began.
            is_report = isinstance(delivered.event, PhasesMeasured)
            if delivered.envelope.epoch != epoch and not is_report:
                continue
            if isinstance(delivered.event, RunClosed):
                return
            await feed.log(reader.add(delivered.envelope))


async def track_recorded(entries: AsyncIterable[Entry], trackers: Mapping[str, Tracker]) -> int:
    """Give trackers the metrics of recorded entries; return the number of measurements."""
    reader, feed, decode = MetricsReader(), _Feed(trackers), EnvelopeReader().decode
    async for entry in entries:
        with suppress(ContractError):  # a dead letter, which the reducer has reported
            await feed.log(reader.add(decode(entry.payload)))
    return feed.given


class _Feed:
    """Calls trackers in a thread, and leaves those out that failed."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self.given = 0

    async def log(self, metrics: StepMetrics | None) -> None:
        if metrics is None:
            return
        self.given += 1
        # A copy: a tracker that fails is removed meanwhile.
        for name, tracker in list(self._trackers.items()):
            try:
                await to_thread.run_sync(tracker.log, metrics)
            except Exception as error:  # the library's own: none may end a run
                del self._trackers[name]
                logger.warning("tracker %s gets nothing more: %s", name, error)
