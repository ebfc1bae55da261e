"""Prompts that are too long are dropped before they are requested, once each, and are counted."""

from __future__ import annotations

import pytest

from tests.support.rollout_parts import answer
from tests.support.waits import PATIENCE
from trinity_events.analysis.audit import Auditor
from trinity_events.core.ledger import Ledger
from trinity_events.log import AsyncPublisher, new_producer, open_run
from trinity_schemas import LedgerRestored, StepRef, StepTrained, decode_envelope


class Overlong:
    """Finds the odd ordinals, once it is not cut off any more."""

    def __init__(self, failures=0):
        self.failures = failures

    async def __call__(self, ordinals):
        if self.failures:
            self.failures -= 1
            raise OSError("the tokenizer cannot be read")
        return [ordinal for ordinal in ordinals if ordinal % 2]


async def books_of(parts):
    auditor = Auditor(parts.run_id)
    for entry in await parts.publisher.log.read():
        auditor.add(decode_envelope(entry.payload))
    [*_, books] = auditor.audit().lineages
    return books


async def test_the_next_prompts_take_the_place_of_overlong_ones_and_each_has_one_fate(parts):
    dispatcher = await parts.dispatcher(window=3)
    dispatcher.find_overlong = Overlong()
    assert await dispatcher.dispatch(3, parts.version) == 3
    assert dispatcher.open_count == 3, "what is dropped leaves its place in the window"
    explorer = parts.explorer()
    assert await answer(explorer, 8) == [0, 2, 4], "no request of another prompt was written"
    groups = await dispatcher.take(2, deadline=PATIENCE)
    assert [group.ordinal for group in groups] == [0, 2]
    await dispatcher.trained(1, groups)
    entries = [decode_envelope(entry.payload) for entry in await parts.publisher.log.read()]
    [trained] = [entry.event for entry in entries if isinstance(entry.event, StepTrained)]
    assert trained.dropped == {"overlong": ((1, 1), (3, 3))}
    books = await books_of(parts)
    assert (books.dropped, books.trained, books.balanced) == ({"overlong": 2}, 2, True)


async def test_a_step_asks_for_more_when_all_prompts_of_a_dispatch_are_overlong(parts):
    dispatcher = await parts.dispatcher(prompts_per_step=1)
    dispatcher.find_overlong = Overlong()
    assert await dispatcher.dispatch(1, parts.version) == 1
    explorer = parts.explorer()
    assert await answer(explorer, 8) == [0]
    await dispatcher.trained(1, await dispatcher.take(1, deadline=PATIENCE))
    assert await dispatcher.dispatch(1, parts.version) == 1
    assert await answer(explorer, 8) == [2]
    assert dispatcher.ledger.dropped == {"overlong": 1}


async def test_a_dispatch_whose_filter_fails_is_completed_by_the_next_one(parts):
    """Invariant 3."""
    dispatcher = await parts.dispatcher()
    dispatcher.find_overlong = Overlong(failures=1)
    with pytest.raises(OSError, match="tokenizer"):
        await dispatcher.dispatch(2, parts.version)
    assert await dispatcher.dispatch(2, parts.version) == 2
    assert await answer(parts.explorer(), 8) == [0, 2]
    assert (await books_of(parts)).balanced


async def test_an_overlong_ordinal_is_dropped_once_over_a_resume(parts):
    """Invariant 1: its fate may not be in the log when the trainer is killed."""
    dispatcher = await parts.dispatcher(prompts_per_step=1)
    dispatcher.find_overlong = Overlong()
    await dispatcher.dispatch(1, parts.version)
    assert await answer(parts.explorer(), 8) == [0]
    await dispatcher.trained(1, await dispatcher.take(1, deadline=PATIENCE))
    await dispatcher.dispatch(2, parts.version)
    ledger, at = dispatcher.ledger_at(1), StepRef(parts.publisher.epoch, 1)
    epoch = await open_run(parts.client, parts.run_id, resume_from=at)
    parts.publisher = AsyncPublisher(parts.publisher.log, epoch, new_producer("trainer"))
    parts.version = StepRef(epoch, 1)
    await parts.publisher.publish(LedgerRestored(ledger=ledger, digest=ledger.digest))
    resumed = await parts.dispatcher(Ledger.restored(ledger), prompts_per_step=1)
    resumed.find_overlong = Overlong()
    await resumed.dispatch(2, parts.version)
    assert await answer(parts.explorer(), 8) == [2, 4]
    await resumed.trained(2, await resumed.take(1, deadline=PATIENCE))
    books = await books_of(parts)
    assert (books.dropped, books.contradictions, books.balanced) == ({"overlong": 2}, [], True)
