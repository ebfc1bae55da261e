"""Answers that no step trains on, from a real dispatcher into the record."""

from contextlib import closing

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("torch")

from tests.support.errors import raises
from tests.support.rollout_parts import Parts, samples_of, settings
from tests.support.waits import PATIENCE
from trinity_events.diagnostics.waits import NO_REPORTS
from trinity_events.errors import DeadlineExceeded
from trinity_events.record.reader import RecordMissing, RolloutRecord
from trinity_events.rollouts import RolloutDispatcher
from trinity_events.rollouts.payloads import RedisPayloads
from trinity_events.server import connect
from trinity_workers.record.discarded import DiscardedRollouts

pytestmark = pytest.mark.processes


@pytest.fixture
async def payloads(weights_url, run_id):
    async with connect(weights_url) as client:
        yield RedisPayloads(client, run_id)


class Filtering:
    """Dispatcher whose steps take one group, and drop those of some ordinals."""

    def __init__(self, parts, dispatcher, explorer, filtered=()):
        self.parts, self.dispatcher, self.explorer = parts, dispatcher, explorer
        self.filtered = filtered

    async def take_step(self, step, oldest=0):
        groups = await self.dispatcher.take(1, deadline=PATIENCE, oldest=oldest, usable=self.judge)
        await self.dispatcher.trained(step, groups)
        return [group.ordinal for group in groups]

    def judge(self, group):
        return "filtered" if group.ordinal in self.filtered else True

    async def answer(self, count):
        for claim in await self.explorer.claim(count, seconds=PATIENCE):
            await self.explorer.answer(claim, samples_of(claim, "a"))


@pytest.fixture
def open_parts(client, publisher, run_id, payloads, make_config):
    """Return a function that opens a dispatcher with a record of what it discards."""

    async def open_one(discarded, *, filtered=(), by_reference=True):
        parts = Parts(client, publisher, run_id)
        store = payloads if by_reference else None
        dispatcher = RolloutDispatcher(
            client,
            publisher,
            settings(run_id, publisher.epoch, prompts_per_step=1),
            payloads=store,
            discarded=discarded,
        )
        await dispatcher.start()
        return Filtering(parts, dispatcher, parts.explorer(payloads=store), filtered)

    return open_one


@pytest.mark.parametrize("by_reference", [True, False], ids=["payload", "stream"])
async def test_every_discarded_answer_is_recorded_before_its_payload_is_freed(
    open_parts, make_config, by_reference
):
    """Invariants 1 and 2."""
    config = make_config(record={"rollouts": "all"})
    record = RolloutRecord(config.checkpoint_folder, config.run_id)
    with closing(DiscardedRollouts(config, NO_REPORTS)) as discarded:
        run = await open_parts(discarded, filtered=(0, 1), by_reference=by_reference)
        await run.dispatcher.dispatch(3, run.parts.version)
        await run.answer(3)
        assert await run.take_step(1) == [2]
        # On disk by now, without an end of the writer.
        recorded, rows = record.find_fate("filtered")
        assert (recorded.step, recorded.files) == (1, ())
        assert [(row["ordinal"], row["sample"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert {(row["step"], row["for_step"], row["fate"]) for row in rows} == {
            (None, 1, "filtered")
        }
        [full] = record.read(recorded, None, ordinal=1, discarded=True)[1:]
        assert (full["completion_ids"], full["logprobs"], full["reward"]) == ([7], [-0.5], 1.0)
        await run.dispatcher.dispatch(1, run.parts.version)
        await run.answer(1)
        # Too old for the second step: asked for again, with a newer version.
        with raises(DeadlineExceeded, deadline=0.2):
            await run.dispatcher.take(1, deadline=0.2, oldest=1)
        await run.dispatcher.publish_dropped()
    stale, rows = record.find_fate("discarded", step=2)
    assert [(row["ordinal"], row["fate"]) for row in rows] == [(3, "stale")] * 2
    assert rows[0]["staleness"] == 1
    assert record.list_steps() == []
    assert discarded.dropped_samples == 0
    with raises(RecordMissing, fault="fate", fate="surplus"):
        record.find_fate("surplus")
    assert stale.is_current


async def test_a_sample_records_the_first_groups_of_each_step(open_parts, make_config):
    """Invariant 2."""
    config = make_config(record={"rollouts": "sample", "groups_per_step": 1})
    with closing(DiscardedRollouts(config, NO_REPORTS)) as discarded:
        run = await open_parts(discarded, filtered=(0, 1, 3))
        await run.dispatcher.dispatch(5, run.parts.version)
        await run.answer(5)
        assert [await run.take_step(1), await run.take_step(2)] == [[2], [4]]
    record = RolloutRecord(config.checkpoint_folder, config.run_id)
    ordinals = [
        {row["ordinal"] for row in record.find_fate("filtered", step)[1]} for step in (1, 2)
    ]
    assert ordinals == [{0}, {3}]


async def test_a_payload_that_is_gone_is_counted(open_parts, make_config, payloads):
    """Invariant 1."""
    config = make_config(record={"rollouts": "all"})
    with closing(DiscardedRollouts(config, NO_REPORTS)) as discarded:
        run = await open_parts(discarded, filtered=(0,))
        await run.dispatcher.dispatch(2, run.parts.version)
        await run.answer(2)
        judge = run.judge

        def lose(group):
            lost.append(group.payload)
            return judge(group)

        lost = []
        run.judge = lose
        # Between the decision and the free: the medium lost it.
        read = discarded.read

        async def read_late():
            await payloads.free(lost[:1])
            await read()

        discarded.read = read_late
        assert await run.take_step(1) == [1]
        assert discarded.dropped_samples == 2


async def test_no_process_is_started_where_nothing_is_discarded(open_parts, make_config):
    """Invariant 3."""
    config = make_config(record={"rollouts": "all"})
    with closing(DiscardedRollouts(config, NO_REPORTS)) as discarded:
        run = await open_parts(discarded)
        await run.dispatcher.dispatch(1, run.parts.version)
        await run.answer(1)
        await run.take_step(1)
        assert discarded._recorder is None
