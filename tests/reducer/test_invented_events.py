"""A client that may append any event of a run deletes no checkpoint, and ends no later opening."""

import re
import time

import pytest

from tests.support.checkpoint_runs import staged
from tests.support.errors import raises
from tests.support.event_histories import committed, finished, registration
from tests.support.pipeline import folded, reducer_task, until
from trinity_events.errors import PublishError
from trinity_events.log import AsyncPublisher, new_producer, open_run
from trinity_events.reducer import Policy
from trinity_events.replay import current_state
from trinity_schemas import Envelope, RunOpened, RunResumed, encode

CHECKPOINT = "latest_checkpointed_iteration.txt"


async def test_invented_checkpoints_delete_no_real_one_and_are_not_named(
    publisher, log, redis_url, run_id, tmp_path
):
    """Three of them made the reducer delete all real checkpoints within two seconds."""
    folder = tmp_path / run_id
    client = AsyncPublisher(log, publisher.epoch, new_producer("actor", 7))

    def steps():
        return sorted(int(path.name[12:]) for path in folder.glob("global_step_*"))

    async def save(step):
        path = f"{staged(step)}/model.pt"
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text("12345678")
        await publisher.publish(committed(step, "checkpoint", registration("checkpoint")))
        await publisher.publish(finished(step, f"s{step}", path, kind="checkpoint"))

    async with reducer_task(redis_url, run_id, tmp_path, Policy(keep_checkpoints=2)):
        for step in (1, 2):
            await save(step)
        await until(lambda: steps() == [1, 2])
        invented = staged(2), f"{staged(90_002)}/model.pt", None
        for step, path in zip((90_001, 90_002, 90_003), invented, strict=True):
            for kind in ("state_dict", "checkpoint"):
                await client.publish(finished(step, f"e{step}-{kind}", path, kind=kind))
                await client.publish(committed(step, kind, registration(kind)))
        await save(3)
        # The oldest goes when a real one is there, and the file names that one.
        await until(lambda: steps() == [2, 3] and (folder / CHECKPOINT).read_text() == "3")
    async with reducer_task(redis_url, run_id, tmp_path, Policy(keep_checkpoints=1)):
        await until(lambda: steps() == [3])
    assert (folder / CHECKPOINT).read_text() == "3"


async def invent_epoch(log, epoch, event):
    """Append an opening as a client may, without taking its number."""
    envelope = Envelope(
        run_id=log.run_id,
        epoch=epoch,
        producer=new_producer("trainer"),
        sequence=1,
        occurred_at=time.time(),
        event=event,
    )
    await log.append(encode(envelope))


@pytest.mark.parametrize("event", [RunOpened(), RunResumed(step=1)])
async def test_the_next_opening_is_above_an_invented_epoch(
    client, publisher, log, redis_url, run_id, event, caplog
):
    await invent_epoch(log, 10**6, event)
    async with reducer_task(redis_url, run_id):
        await until(lambda: _counted(log, 10**6))
        epoch = await open_run(client, run_id, resume_from=1)
        await folded(log)
    state = await current_state(log)
    assert (epoch, state.epoch, state.anomaly_counts) == (10**6 + 1, 10**6 + 1, {})
    assert f"an event opened epoch {10**6} of run {run_id}" in caplog.text


async def _counted(log, epoch):
    return await log.newest_epoch() == epoch


async def test_an_epoch_at_the_bound_of_the_contract_is_an_anomaly_and_opens_none(
    client, publisher, log, redis_url, run_id
):
    for epoch in (2**53, 2**53 - 1, 2**26 + 2):
        await invent_epoch(log, epoch, RunOpened())
    async with reducer_task(redis_url, run_id):
        await folded(log)
        assert await open_run(client, run_id) == 2
        await folded(log)
    state = await current_state(log)
    assert (state.epoch, state.anomaly_counts) == (2, {"epoch-jump": 3})


async def test_an_opening_waits_until_a_reducer_has_raised_the_counter(
    client, publisher, log, redis_url, run_id
):
    await invent_epoch(log, 50, RunOpened())
    entries = len(await log.read())
    with raises(PublishError, run_id=run_id, reason=re.compile("is in epoch 50, ")):
        await open_run(client, run_id, above=50, deadline=0.2)
    assert len(await log.read()) == entries, "no stale opening is appended"
    async with reducer_task(redis_url, run_id):
        assert await open_run(client, run_id, above=50) == 51
