"""A trainer whose checkpoint root is not the reducer's hears of it, with both paths."""

import logging
import socket

import pytest

from tests.support.pipeline import folded, reducer_task, until
from trinity_events import CheckpointCoordinator
from trinity_events.checkpoints.layout import REDUCER_MARK
from trinity_events.log import Publisher, SyncEventLog, new_producer


@pytest.fixture
def commits(publisher, sync_client, run_id):
    """Commits steps of a trainer that writes its checkpoints below a root."""
    own = Publisher(SyncEventLog(sync_client, run_id), publisher.epoch, new_producer("trainer"))

    async def commit(root, *steps):
        coordinator = CheckpointCoordinator(own, root / run_id)
        for step in steps:
            await coordinator.register_and_monitor(step)

    yield commit
    own.close()


async def leads(log):
    await until(log.get_leader_folder)


async def test_a_trainer_with_another_root_hears_of_it_once_with_both_paths(
    commits, log, redis_url, run_id, tmp_path, caplog
):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    async with reducer_task(redis_url, run_id, theirs):
        await leads(log)
        with caplog.at_level(logging.WARNING):
            await commits(ours, 1, 2)
    [message] = [record.message for record in caplog.records if "uses the folder" in record.message]
    assert f"{theirs / run_id} on {socket.gethostname()}" in message
    assert str(ours / run_id) in message
    assert "--checkpoint-root" in message


async def test_the_same_root_under_another_name_is_the_same(
    commits, log, redis_url, run_id, tmp_path, caplog
):
    (tmp_path / "link").symlink_to(tmp_path / "root", target_is_directory=True)
    async with reducer_task(redis_url, run_id, tmp_path / "root"):
        await leads(log)
        await commits(tmp_path / "link", 1)
    assert "uses the folder" not in caplog.text


async def test_a_reducer_that_leads_no_more_is_not_compared_with(
    commits, log, redis_url, run_id, tmp_path, caplog
):
    async with reducer_task(redis_url, run_id, tmp_path / "yesterday"):
        await leads(log)
    assert await log.get_leader_folder() is None
    await commits(tmp_path / "today", 1)
    async with reducer_task(redis_url, run_id, tmp_path / "today"):
        await leads(log)
        await commits(tmp_path / "today", 2)
    assert "uses the folder" not in caplog.text


async def test_a_folder_that_cannot_be_marked_stops_nothing(log, redis_url, run_id, tmp_path):
    (tmp_path / run_id / REDUCER_MARK).mkdir(parents=True)
    async with reducer_task(redis_url, run_id, tmp_path):
        await folded(log)
    assert [path.name for path in (tmp_path / run_id).glob(f"{REDUCER_MARK}*")] == [REDUCER_MARK]
