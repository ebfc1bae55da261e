"""Readers that come before the reducer has given a ready step's folder its final name."""

import re

import anyio
import pytest

from tests.support.checkpoint_runs import staged
from tests.support.errors import raises
from tests.support.event_histories import committed, finished, registration
from tests.support.pipeline import reducer_task
from tests.support.waits import PATIENCE
from trinity_events.checkpoints.layout import final_name
from trinity_events.client.checkpoint_lease import hold_checkpoint
from trinity_events.errors import CheckpointHeld, DeadlineExceeded
from trinity_events.log import RedisEventLog


@pytest.fixture
def save(publisher, run_id, tmp_path):
    """Saves a file of a step, and says that its kind is whole."""

    async def save(step, kind="checkpoint", name="aaaa"):
        path = f"{staged(step, name=name)}/{kind}.pt"
        (tmp_path / run_id / path).parent.mkdir(parents=True)
        (tmp_path / run_id / path).write_text(kind)
        await publisher.publish(
            finished(step, f"{kind}-{step}", kind=kind, path=path, nbytes=len(kind))
        )
        await publisher.publish(committed(step, kind, registration(kind)))

    return save


@pytest.fixture
def hold(run_id, redis_url, tmp_path):
    def hold(step, **options):
        return hold_checkpoint(
            run_id, step, redis_url=redis_url, checkpoint_root=tmp_path, **options
        )

    return hold


@pytest.fixture
def waiting(monkeypatch):
    """An event that a reader waits; nothing but the reducer's notification ends the wait."""
    waits, wait = anyio.Event(), RedisEventLog.promoted_after

    async def observed(self, after, *, seconds):
        waits.set()
        return await wait(self, after, seconds=max(seconds, PATIENCE))

    monkeypatch.setattr(RedisEventLog, "promoted_after", observed)
    return waits


async def test_a_reader_that_is_early_gets_the_folder_once_the_reducer_has_named_it(
    save, hold, waiting, redis_url, run_id, tmp_path
):
    await save(1)
    files = []

    async def read():
        async with hold(1, deadline=PATIENCE) as folder:
            files.extend((folder.name, file.read_text()) for file in folder.glob("*.pt"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await waiting.wait()
        async with reducer_task(redis_url, run_id, tmp_path):
            with anyio.fail_after(PATIENCE):
                while not files:
                    await anyio.sleep(0.01)
    assert files == [(final_name(1), "checkpoint")]


async def test_a_reader_gets_no_version_of_which_a_ready_checkpoint_is_yet_to_be_a_part(
    save, hold, waiting, redis_url, run_id, tmp_path
):
    folder = tmp_path / run_id / final_name(1)
    async with reducer_task(redis_url, run_id, tmp_path):
        await save(1, "state_dict")
        async with hold(1, deadline=PATIENCE) as checkpoint:
            assert [file.name for file in checkpoint.glob("*.pt")] == ["state_dict.pt"]
    await save(1, "checkpoint", name="bbbb")  # and the reducer is away
    assert folder.is_dir()
    with raises(DeadlineExceeded, missing=re.compile("step 1 .*, but its files"), deadline=0.5):
        async with hold(1, deadline=0.5):
            pass
    async with reducer_task(redis_url, run_id, tmp_path), hold(1, deadline=PATIENCE) as checkpoint:
        assert {file.name for file in checkpoint.glob("*.pt")} == {"state_dict.pt", "checkpoint.pt"}


async def test_a_reader_that_waits_in_vain_is_told_what_was_missing(save, hold):
    await save(1)
    with raises(DeadlineExceeded, missing=re.compile("global_step_1$"), deadline=0.5):
        async with hold(1, deadline=0.5):
            pass


async def test_nothing_is_waited_for_that_is_not_ready_or_has_no_files_here(
    save, hold, run_id, tmp_path
):
    await save(1)
    (tmp_path / run_id).rename(tmp_path / "elsewhere")
    for step in (1, 2):
        with raises(CheckpointHeld, run_id=run_id, step=step, fault="absent"):
            async with hold(step, deadline=PATIENCE):
                pass
