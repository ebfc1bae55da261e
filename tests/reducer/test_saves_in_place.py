"""Retention of saves in the layout of Trinity-RFT, `global_step_N/actor`, without staging."""

from __future__ import annotations

import anyio
import pytest

from tests.support.checkpoint_runs import Run
from tests.support.event_histories import committed, finished, registration, started
from tests.support.pipeline import reducer_task, until
from trinity_events import CheckpointCoordinator
from trinity_events.checkpoints.layout import SAVED_IN_PLACE, VERIFIED, format_in_place
from trinity_events.core import plan_files
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_events.reducer import Policy

ITERATION = "latest_checkpointed_iteration.txt"


async def test_the_last_two_stay_and_an_older_one_goes_once_a_newer_one_is_ready(tmp_path):
    run = Run(tmp_path)
    for step, remaining_steps in ((1, [1]), (2, [1, 2]), (3, [2, 3]), (7, [3, 7])):
        run.save_in_place(step)
        await run.clean_up()
        assert run.steps == remaining_steps
        assert (run.folder / ITERATION).read_text() == str(step)


async def test_nothing_goes_before_the_newer_one_is_ready_and_has_its_files(tmp_path):
    run = Run(tmp_path, keep=1)
    run.save_in_place(1)
    run.history.add(committed(2, "checkpoint", registration("checkpoint")))
    run.history.add(started(2, "running", kind="checkpoint"))
    await run.clean_up()
    assert run.steps == [1]
    path = "global_step_2/actor/model.pt"  # which is not there
    run.history.add(finished(2, "running", kind="checkpoint", path=path, nbytes=3))
    run.files.reconcile(plan_files(run.state))
    await run.clean_up()
    assert run.steps == [1]


async def test_saves_that_a_reducer_sees_late_count_by_their_marks(tmp_path):
    run = Run(tmp_path)
    reconcile, run.files.reconcile = run.files.reconcile, lambda plan: False
    for step in range(1, 5):
        run.save_in_place(step)
    (run.folder / "global_step_2" / "actor" / "model.pt").unlink()
    run.files.reconcile = reconcile
    reconcile(plan_files(run.state))
    await run.clean_up()
    assert run.steps == [2, 3, 4], "a folder without files counts for nothing"


async def test_events_alone_remove_no_folder_and_let_none_be_removed(tmp_path):
    run = Run(tmp_path, keep=1)
    for step in (1, 2, 3):
        run.save_in_place(step)
        (run.folder / f"global_step_{step}" / SAVED_IN_PLACE).unlink()
        (run.folder / f"global_step_{step}" / VERIFIED).unlink()
    run.files.reconcile(plan_files(run.state))
    await run.clean_up()
    assert run.steps == [1, 2, 3], "copied by hand, as far as the disk says"
    (run.folder / "global_step_3" / SAVED_IN_PLACE).write_text(format_in_place(1, 2))
    run.files.reconcile(plan_files(run.state))
    assert not (run.folder / "global_step_3" / VERIFIED).exists(), "it is of another step"


async def test_a_folder_that_another_save_writes_to_stays_until_that_has_ended(tmp_path):
    run = Run(tmp_path, keep=1)
    run.save_in_place(1)
    run.history.add(started(1, "beside", kind="state_dict", name="other"))
    run.save_in_place(2)
    await run.clean_up()
    assert run.steps == [1, 2]
    run.history.add(finished(1, "beside", kind="state_dict", name="other"))
    await run.clean_up()
    assert run.steps == [2]


async def test_a_state_dict_and_the_checkpoint_of_one_folder_count_together(tmp_path):
    run = Run(tmp_path, keep=1)
    for step in (1, 2):
        run.save_in_place(step, kind="state_dict")
        run.save_in_place(step, name="optimizer.pt")
        await run.clean_up()
    assert run.steps == [2]
    for name in (ITERATION, "latest_state_dict_iteration.txt"):
        assert (run.folder / name).read_text() == "2"


async def test_a_link_is_not_followed(tmp_path):
    run = Run(tmp_path, keep=1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run.folder.mkdir()
    (run.folder / "global_step_1").symlink_to(elsewhere)
    for step in (1, 2, 3):
        run.save_in_place(step)
    await run.clean_up()
    assert run.steps == [1, 3]
    assert (elsewhere / "actor" / "model.pt").exists()


@pytest.mark.server
async def test_saves_of_a_coordinator_in_the_seeds_layout_are_removed_by_a_live_reducer(
    tmp_path, publisher, redis_url, sync_client, run_id
):
    own = Publisher(SyncEventLog(sync_client, run_id), publisher.epoch, new_producer("actor"))
    coordinator = CheckpointCoordinator(own, tmp_path / run_id)
    async with reducer_task(redis_url, run_id, root=tmp_path, policy=Policy(keep_checkpoints=2)):
        for step in range(1, 5):
            path = tmp_path / run_id / f"global_step_{step}" / "actor" / "model.pt"
            path.parent.mkdir(parents=True)
            await anyio.to_thread.run_sync(
                lambda path=path, step=step: coordinator.save_sync(
                    lambda: path.write_bytes(b"x"), step, name="model", path=path
                )
            )
            await coordinator.register_and_monitor(step, checkpoint_thread_count=1)
        await until(lambda: sorted(step_names(tmp_path / run_id)) == [3, 4])
    coordinator.wait_all()
    own.close()


def step_names(run):
    return [int(path.name[12:]) for path in run.glob("global_step_*")]
