"""The experience stream on a real server, and the explorer that fills it."""

import secrets
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import redis.asyncio

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from trinity_workers.experiences import GROUP, ExperienceReader, ExperienceWriter  # noqa: E402

from tests.support.experiences import EPOCH, group  # noqa: E402
from tests.support.pipeline import reducer_task  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events import Synchronizer  # noqa: E402
from trinity_events.errors import (  # noqa: E402
    CorruptVersion,
    DeadlineExceeded,
    StaleEpoch,
    VersionUnavailable,
)
from trinity_events.server import open_client  # noqa: E402
from trinity_schemas import ExperienceGroup, RunKeys, StepRef, chunk_key  # noqa: E402
from trinity_workers import experiences  # noqa: E402
from trinity_workers.config import RunConfig  # noqa: E402
from trinity_workers.explorer import Explorer  # noqa: E402
from trinity_workers.learning.policy import load_policy  # noqa: E402


@pytest.fixture
def writer(client, run_id):
    return ExperienceWriter(client, run_id, bound=100)


@pytest.fixture
def reader(client, run_id):
    return ExperienceReader(client, run_id, EPOCH)


async def add_all(writer: ExperienceWriter, *groups: ExperienceGroup) -> None:
    for one in groups:
        await writer.add(one, deadline=PATIENCE)


async def waiting(client: redis.asyncio.Redis, run_id: str) -> int:
    return await client.xlen(RunKeys.of(run_id).experiences)


def ids(groups: list[ExperienceGroup]) -> list[str]:
    return [one.group_id for one in groups]


async def test_a_steps_groups_are_taken_together_whatever_the_order_they_came_in(
    writer, reader, run_id
):
    order = [(2, 0), (1, 1), (3, 0), (2, 1), (1, 0), (3, 1)]
    await add_all(writer, *(group(run_id, step, index) for step, index in order))
    for step in (1, 2, 3):
        groups, entry_ids = await reader.take(step, 2, deadline=PATIENCE)
        assert sorted(ids(groups)) == [f"2-{step}-0", f"2-{step}-1"]
        await reader.ack(entry_ids, deadline=PATIENCE)
    assert reader.dropped == 0


async def test_a_group_arrives_as_it_was_sent_also_after_the_wait_began(writer, reader, run_id):
    sent = group(run_id, 1)

    async def send_later():
        await anyio.sleep(0.1)
        await writer.add(sent, deadline=PATIENCE)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send_later)
        groups, _ = await reader.take(1, 1, deadline=PATIENCE)
    assert groups == [sent]


async def test_only_acknowledgement_frees_the_stream(writer, reader, client, run_id):
    await add_all(writer, *(group(run_id, 1, index) for index in range(3)))
    _, entry_ids = await reader.take(1, 3, deadline=PATIENCE)
    assert await waiting(client, run_id) == 3
    await reader.ack(entry_ids, deadline=PATIENCE)
    assert await waiting(client, run_id) == 0
    assert (await client.xpending(RunKeys.of(run_id).experiences, GROUP))["pending"] == 0


async def test_a_writer_at_the_bound_waits_until_there_is_room(client, reader, run_id):
    writer = ExperienceWriter(client, run_id, bound=2)
    await add_all(writer, group(run_id, 1), group(run_id, 2))
    added = anyio.Event()

    async def add_third():
        await writer.add(group(run_id, 3), deadline=PATIENCE)
        added.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(add_third)
        _, entry_ids = await reader.take(1, 1, deadline=PATIENCE)
        await anyio.sleep(0.1)
        assert not added.is_set(), "what is taken is not yet used"
        await reader.ack(entry_ids, deadline=PATIENCE)
        with anyio.fail_after(PATIENCE):
            await added.wait()
    assert await waiting(client, run_id) == 2


async def test_a_writer_that_finds_no_room_in_time_says_who_makes_none(client, run_id):
    writer = ExperienceWriter(client, run_id, bound=1)
    await writer.add(group(run_id, 1), deadline=PATIENCE)
    with pytest.raises(DeadlineExceeded, match=r"1 experience groups .* wait for the trainer"):
        await writer.add(group(run_id, 2), deadline=0.1)
    assert await waiting(client, run_id) == 1


async def test_what_is_of_no_use_is_dropped_counted_and_freed(writer, reader, client, run_id):
    await add_all(
        writer,
        group(run_id, 1, epoch=EPOCH - 1),
        group("another-run", 1),
        group(run_id, 0),  # of a step that is over
    )
    await client.xadd(RunKeys.of(run_id).experiences, {b"e": b"\xc1 no MessagePack"})
    await client.xadd(RunKeys.of(run_id).experiences, {b"other": b"field"})
    await writer.add(group(run_id, 1), deadline=PATIENCE)
    groups, _ = await reader.take(1, 1, deadline=PATIENCE)
    assert ids(groups) == ["2-1-0"]
    assert reader.dropped == 5
    assert await waiting(client, run_id) == 1


async def test_a_group_that_was_sent_twice_counts_once(writer, reader, run_id):
    # A command that is sent again after a lost reply, or an explorer that was started again.
    await add_all(writer, group(run_id, 1, 0), group(run_id, 1, 0), group(run_id, 1, 1))
    groups, _ = await reader.take(1, 2, deadline=PATIENCE)
    assert ids(groups) == ["2-1-0", "2-1-1"]
    assert reader.dropped == 1


async def test_a_deadline_says_how_many_of_how_many_came(writer, reader, run_id):
    await add_all(writer, group(run_id, 4, 0), group(run_id, 4, 1), group(run_id, 5))
    with pytest.raises(DeadlineExceeded, match=r"2 of 3 experience groups for step 4 .* alive\?"):
        await reader.take(4, 3, deadline=0.2)
    # The wait may be taken up again.
    await writer.add(group(run_id, 4, 2), deadline=PATIENCE)
    groups, _ = await reader.take(4, 3, deadline=PATIENCE)
    assert len(groups) == 3


async def test_a_trainer_takes_over_what_a_dead_one_of_its_epoch_had_read(
    writer, reader, client, run_id
):
    await add_all(writer, group(run_id, 1), group(run_id, 2))
    dead = ExperienceReader(client, run_id, EPOCH)
    await dead.take(1, 1, deadline=PATIENCE)
    for step in (1, 2):
        groups, entry_ids = await reader.take(step, 1, deadline=PATIENCE)
        assert ids(groups) == [f"2-{step}-0"]
        await reader.ack(entry_ids, deadline=PATIENCE)
    assert (reader.dropped, await waiting(client, run_id)) == (0, 0)


async def test_a_second_epoch_is_not_starved_by_what_the_first_left_unacknowledged(
    client, reader, run_id
):
    # More than one page of what can be claimed at once, and no room left.
    writer = ExperienceWriter(client, run_id, bound=250)
    await add_all(writer, *(group(run_id, 1, index, epoch=1) for index in range(250)))
    dead = ExperienceReader(client, run_id, 1)
    await dead.take(1, 250, deadline=PATIENCE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: writer.add(group(run_id, 1), deadline=PATIENCE))
        groups, entry_ids = await reader.take(1, 1, deadline=PATIENCE)
    await reader.ack(entry_ids, deadline=PATIENCE)
    assert ids(groups) == ["2-1-0"]
    assert (reader.dropped, await waiting(client, run_id)) == (250, 0)


async def test_a_trainer_of_an_old_epoch_ends_and_leaves_the_new_one_what_is_its_own(
    writer, client, reader, run_id, monkeypatch
):
    monkeypatch.setattr(experiences, "BLOCK", 0.1)
    old = ExperienceReader(client, run_id, EPOCH - 1)
    await writer.add(group(run_id, 1), deadline=PATIENCE)
    with pytest.raises(StaleEpoch, match=f"opened anew as epoch {EPOCH}: this trainer is of epoch"):
        await old.take(1, 1, deadline=PATIENCE)
    groups, _ = await reader.take(1, 1, deadline=PATIENCE)
    assert ids(groups) == [f"{EPOCH}-1-0"]


async def test_a_group_whose_delivery_was_lost_is_found_again(
    writer, reader, client, run_id, monkeypatch
):
    monkeypatch.setattr(experiences, "BLOCK", 0.1)
    await add_all(writer, group(run_id, 1), group(run_id, 2, 0), group(run_id, 2, 1))
    groups, first = await reader.take(1, 1, deadline=PATIENCE)
    await writer.add(group(run_id, 2, 2), deadline=PATIENCE)
    # Handed out to us, in a reply that a broken connection swallowed.
    lost = await client.xreadgroup(GROUP, experiences.MEMBER, {RunKeys.of(run_id).experiences: ">"})
    assert len(lost[0][1]) == 1
    groups, second = await reader.take(2, 3, deadline=PATIENCE)
    assert ids(groups) == ["2-2-0", "2-2-1", "2-2-2"]
    await reader.ack([*first, *second], deadline=PATIENCE)
    assert (reader.dropped, await waiting(client, run_id)) == (0, 0)


# --- explorers --------------------------------------------------------------------------------


@pytest.fixture
async def config(make_config, redis_url, run_id):
    """One step of one question, with a reducer running."""
    async with reducer_task(redis_url, run_id):
        yield make_config(
            steps=1,
            rollouts={"prompts_per_step": 1, "samples_per_prompt": 2},
            explorer={"held_out_questions": 0},
            sync={"timeout": PATIENCE},
        )


@pytest.fixture
def trainer(config):
    made = Synchronizer(
        config.run_id, config.epoch, redis_url=config.redis_url, weights_url=config.weights_url
    )
    yield made
    made.close()


def publish(trainer: Synchronizer, folder: Path, step: int) -> None:
    model, _ = load_policy(folder)
    trainer.open_version(step)
    trainer.publish(model.named_parameters(), step)
    trainer.commit(step)


def spoil(config: RunConfig, step: int, how: str) -> None:
    key = chunk_key(config.run_id, config.epoch, step, 0, 0)
    with open_client(config.weights_url) as client:
        if how == "gone":
            client.delete(key)
        else:  # as by a second upload of the step, which has the same keys
            client.setrange(key, 100, secrets.token_bytes(8))


@pytest.mark.parametrize("how", ["changed", "gone"])
async def test_an_explorer_that_meets_a_version_of_no_use_goes_on_with_the_next(
    config, trainer, client, how, caplog
):
    publish(trainer, config.model_folder, 0)
    spoil(config, 0, how)
    explorer = Explorer(config, 0)
    await explorer.prepare()

    async def publish_next():
        with anyio.fail_after(PATIENCE):
            while "waits for newer weights" not in caplog.text:
                await anyio.sleep(0.01)
        await anyio.to_thread.run_sync(publish, trainer, config.model_folder, 1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish_next)
        result = await explorer.explore()
    assert (result.applied, result.groups) == (1, 1)
    groups, _ = await ExperienceReader(client, config.run_id, config.epoch).take(
        1, 1, deadline=PATIENCE
    )
    assert groups[0].version == StepRef(config.epoch, 1)


@pytest.mark.parametrize(
    ("how", "cause"), [("changed", CorruptVersion), ("gone", VersionUnavailable)]
)
async def test_an_explorer_to_whom_no_newer_version_comes_says_what_was_wrong_with_the_last(
    config, trainer, how, cause
):
    publish(trainer, config.model_folder, 0)
    spoil(config, 0, how)
    explorer = Explorer(config.replaced("sync", timeout=1.0), 0)
    await explorer.prepare()
    with pytest.raises(DeadlineExceeded, match=r"newest: of step 0.*no use: chunk 0") as caught:
        await explorer.explore()
    assert isinstance(caught.value.__cause__, cause)
