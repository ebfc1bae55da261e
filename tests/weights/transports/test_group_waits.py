"""Waits of a trainer for the explorers of a collective group are events."""

import anyio.to_thread
import pytest

from tests.support.pipeline import events_of
from trinity_events import Synchronizer
from trinity_events.diagnostics.waits import WaitReporter
from trinity_events.errors import DeadlineExceeded
from trinity_schemas import WaitEnded, WaitStarted


async def test_explorers_that_a_trainer_waits_for_are_a_reported_wait(
    redis_url, weights_url, publisher, log, run_id
):
    trainer = Synchronizer(
        *(run_id, publisher.epoch),
        redis_url=redis_url,
        weights_url=weights_url,
        transport="collective",
    )
    events = trainer._session.events
    events.waits = WaitReporter(events, threshold=0.05)
    try:
        with pytest.raises(DeadlineExceeded):
            await anyio.to_thread.run_sync(trainer.setup_weight_sync_group, 2, 5.0)
        trainer.flush()
    finally:
        trainer.close()
    [wait] = await events_of(log, WaitStarted)
    assert wait.event.what == "2 explorers in the collective group, of which 0 are there"
    assert wait.event.deadline == 5.0
    assert [envelope.event.outcome for envelope in await events_of(log, WaitEnded)] == ["deadline"]
