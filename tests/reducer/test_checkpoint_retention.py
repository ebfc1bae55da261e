"""Old checkpoints go once a newer one is ready; what is read, or still to come, does not."""

import os
import time

import anyio
import pytest

from tests.support.checkpoint_runs import Run, staged
from tests.support.errors import raises
from tests.support.event_histories import committed, finished, registration, started
from tests.support.pipeline import reducer_task, until
from trinity_events.checkpoints.layout import TRASH
from trinity_events.client.checkpoint_lease import hold_checkpoint
from trinity_events.core import plan_files
from trinity_events.errors import CheckpointHeld, InvalidRunId
from trinity_events.reducer import Policy
from trinity_events.reducer.checkpoint_retention import ENDED
from trinity_events.reducer.checkpoint_trash import CheckpointTrash
from trinity_events.reducer.live_state import LiveState
from trinity_schemas import RunOpened, RunResumed


async def test_the_last_two_checkpoints_stay(tmp_path):
    run = Run(tmp_path)
    for step, remaining_steps in ((1, [1]), (2, [1, 2]), (3, [2, 3]), (7, [3, 7])):
        run.save(step)
        await run.clean_up()
        assert run.steps == remaining_steps
    assert list((run.folder / TRASH).iterdir()) == []


async def test_nothing_goes_before_the_newer_one_has_its_name(tmp_path):
    run = Run(tmp_path, keep=1)
    for step in (1, 2):
        run.save(step)
    named = run.folder / "global_step_2"
    named.rename(run.folder / staged(2))  # ready, but the disk refused the last rename so far
    await run.clean_up()
    assert run.steps == [1]
    run.files.reconcile(plan_files(run.state))
    await run.clean_up()
    assert run.steps == [2]


async def test_zero_keeps_every_checkpoint(tmp_path):
    run = Run(tmp_path, keep=0)
    for step in (1, 2, 3):
        run.save(step)
    await run.clean_up()
    assert run.steps == [1, 2, 3]


async def test_what_the_reducer_did_not_make_is_never_removed(tmp_path):
    run = Run(tmp_path, keep=1)
    for foreign in ("global_step_1", ".staging/by-hand", "best_model"):
        (run.folder / foreign).mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".made_from").write_text("linked")
    (run.folder / "global_step_2").symlink_to(elsewhere)
    for step in (3, 4):
        run.save(step)
    await run.clean_up()
    assert run.steps == [1, 2, 4]
    assert run.left_in_staging == ["by-hand"]
    assert (run.folder / "best_model").is_dir()
    assert elsewhere.is_dir()


@pytest.mark.parametrize("save", [Run.save, Run.save_in_place])
async def test_a_checkpoint_that_a_reader_holds_stays_until_it_lets_go(tmp_path, save):
    """Invariant 1 of checkpoint_lease.py."""
    run = Run(tmp_path, keep=1)
    for step in (1, 2, 3):
        save(run, step)
    assert await run.log.acquire_lease(1, "reader", 60)
    await run.clean_up()
    assert run.steps == [1, 3]
    await run.log.release_lease(1, "reader")
    await run.clean_up()
    assert run.steps == [3]


async def test_no_reader_can_take_hold_of_what_is_being_removed(tmp_path, monkeypatch):
    """Invariant 1 of checkpoint_lease.py."""
    run = Run(tmp_path, keep=1)
    for step in (1, 2):
        run.save(step)
    put, tried = CheckpointTrash.move, []

    def put_while_a_reader_comes(self, step, identity):
        tried.append(anyio.from_thread.run(run.log.acquire_lease, step, "late", 60))
        return put(self, step, identity)

    monkeypatch.setattr(CheckpointTrash, "move", put_while_a_reader_comes)
    await run.clean_up()
    assert (tried, run.steps) == ([False], [2])
    assert await run.log.acquire_lease(1, "later", 60), "the mark is gone with the checkpoint"


async def test_a_leader_that_was_overtaken_puts_back_what_it_moved(tmp_path, monkeypatch):
    run = Run(tmp_path, keep=1)
    for step in (1, 2):
        run.save(step)
    stale = await run.removal()
    put = CheckpointTrash.move

    def put_after_a_long_sleep(self, step, identity):
        async def take_over():
            await run.log.renew(stale._token, 0)
            token, _ = await run.log.lead(60)
            await run.log.clear_deleting(token, [step])
            assert await run.log.acquire_lease(step, "reader", 60)

        anyio.from_thread.run(take_over)
        return put(self, step, identity)

    monkeypatch.setattr(CheckpointTrash, "move", put_after_a_long_sleep)
    await stale.clean_up(run.state)
    assert run.steps == [1, 2]
    assert (run.folder / "global_step_1" / "model.pt").read_text() == "1.1"


async def test_a_step_that_was_made_anew_meanwhile_is_not_the_one_that_was_meant(tmp_path):
    run = Run(tmp_path)
    run.save(1)
    trash = CheckpointTrash(run.files, 1)
    [(step, identity)] = trash.made().items()
    (run.folder / "global_step_1").rename(run.folder / "moved")
    (run.folder / "global_step_1").mkdir()
    assert trash.move(step, identity) is None
    assert run.steps == [1]


async def test_marks_that_a_dead_leader_left_keep_no_reader_out(tmp_path):
    run = Run(tmp_path)
    for step in (1, 2, 3):
        run.save(step)
    dead, _ = await run.log.lead(60)
    assert await run.log.mark_deleting(dead, [1, 3]) == {1, 3}
    trash = CheckpointTrash(run.files, dead)
    assert trash.move(1, trash.made()[1]) is not None
    assert await run.log.mark_deleting(dead, [9]) == {9}, "whose folder is all gone"
    await run.log.renew(dead, 0)
    removal = await run.removal()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(removal.run, LiveState(run.state))
        for step in (1, 3, 9):
            await until(lambda step=step: run.log.acquire_lease(step, "reader", 60))
        tasks.cancel_scope.cancel()


async def test_a_reducer_that_is_told_to_stop_leaves_no_mark(tmp_path, monkeypatch):
    run = Run(tmp_path, keep=1)
    for step in (1, 2):
        run.save(step)
    listed, scope = CheckpointTrash.listed, anyio.CancelScope()

    def told_to_stop(self):
        anyio.from_thread.run_sync(scope.cancel)
        return listed(self)

    monkeypatch.setattr(CheckpointTrash, "listed", told_to_stop)
    remover = await run.removal()
    with scope:
        await remover.clean_up(run.state)
    assert scope.cancelled_caught
    assert run.steps == [2]
    assert await run.log.acquire_lease(1, "reader", 60)


async def test_what_saves_left_behind_is_removed_and_what_may_be_written_is_not(tmp_path):
    run = Run(tmp_path)
    for folder in (
        staged(1, name="bbbb"),  # of a step that is ready, by another attempt
        staged(2, name="cccc"),  # of a step that is not
        staged(3, name="dddd"),  # of a step that nobody spoke of
        staged(9, epoch=2, name="eeee"),  # of an epoch to come
    ):
        (run.folder / folder).mkdir(parents=True)
    run.save(1)
    run.history.add(started(2, "running", kind="checkpoint"))
    await run.clean_up()
    others = [staged(2, name="cccc"), staged(3, name="dddd"), staged(9, epoch=2, name="eeee")]
    assert run.left_in_staging == [path.removeprefix(".staging/") for path in others]
    run.history.add(RunResumed(step=1), epoch=2)
    await run.clean_up()
    assert len(run.left_in_staging) == 3, "the log alone removes none"
    run.save(4, epoch=2)
    await run.clean_up()
    assert run.left_in_staging == ["epoch_2_step_9_eeee"]
    assert run.steps == [1, 4]


async def test_what_lies_still_for_a_short_while_only_is_not_left_behind(tmp_path):
    run = Run(tmp_path, staged_grace=600.0)
    (run.folder / staged(1, name="bbbb")).mkdir(parents=True)
    run.save(1)
    await run.clean_up()
    assert run.left_in_staging == ["epoch_1_step_1_bbbb"]


async def test_a_save_that_was_killed_is_removed_soon_after_a_resume_unless_it_is_written(
    tmp_path, monkeypatch
):
    run = Run(tmp_path, staged_grace=600.0)
    killed, written = staged(2, name="bbbb"), staged(2, name="cccc")
    outside = tmp_path / "outside"
    outside.mkdir()
    for folder in (killed, written):
        (run.folder / folder).mkdir(parents=True)
        (run.folder / folder / "model.pt").write_text("half")
    (run.folder / killed / "link").symlink_to(outside)
    (outside / "file").touch()
    run.save(1)
    later = time.time() + 2 * ENDED
    monkeypatch.setattr("trinity_events.reducer.checkpoint_trash.time.time", lambda: later)
    os.utime(run.folder / written / "model.pt", (later, later))
    run.history.add(RunResumed(step=1), epoch=2)
    await run.clean_up()
    assert len(run.left_in_staging) == 2, "no newer checkpoint is there yet"
    run.save(2, epoch=2)
    await run.clean_up()
    assert run.left_in_staging == ["epoch_1_step_2_cccc"], "it may still be written"
    assert (outside / "file").exists()


@pytest.mark.parametrize("opening", [RunOpened(), RunResumed(step=4)])
async def test_what_a_checkpoint_of_a_later_epoch_took_the_place_of_stays(tmp_path, opening):
    run = Run(tmp_path)
    run.save(5)
    run.save(9)
    run.history.add(opening, epoch=2)
    run.save(5, epoch=2)
    await run.clean_up()
    assert (run.folder / "global_step_5" / "model.pt").read_text() == "2.5"
    assert run.left_in_staging == ["epoch_2_step_5_aaaa.replaced_global_step_5"]
    for step in (6, 7):
        run.save(step, epoch=2)
        await run.clean_up()
    for step in (10, 11):
        run.save(step, epoch=2)
        await run.clean_up()
    await run.clean_up()
    assert run.steps == [9, 10, 11]
    assert run.left_in_staging == ["epoch_2_step_5_aaaa.replaced_global_step_5"]
    replaced_file = run.folder / ".staging" / run.left_in_staging[0] / "model.pt"
    assert [replaced_file.read_text(), (run.folder / "global_step_9" / "model.pt").read_text()] == [
        "1.5",
        "1.9",
    ]


async def test_a_disk_that_refuses_is_said_once_and_tried_again(tmp_path, caplog, monkeypatch):
    run = Run(tmp_path, keep=1, retention_pause=0.01, retention_every=0.01)
    for step in (1, 2):
        run.save(step)
    broken = [True]
    made = CheckpointTrash.made

    def sometimes(self):
        if broken:
            raise PermissionError(13, "Permission denied", "/ckpt")
        return made(self)

    monkeypatch.setattr(CheckpointTrash, "made", sometimes)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon((await run.removal()).run, LiveState(run.state))
        await until(lambda: "cannot be removed" in caplog.text)
        await anyio.sleep(0.1)
        assert caplog.text.count("cannot be removed") == 1
        broken.clear()
        await until(lambda: run.steps == [2])
        tasks.cancel_scope.cancel()


async def test_what_cannot_be_removed_keeps_nothing_else(tmp_path, caplog, monkeypatch):
    # As a folder that its user made read-only, to keep it; root, who runs tests, may do it all.
    run = Run(tmp_path, keep=1, retention_every=0.01)
    put, remove = CheckpointTrash.move, CheckpointTrash.remove
    for step in (1, 2, 3, 4):
        run.save(step)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    def put_others(self, step, identity):
        return refuse(run.folder / "global_step_1") if step == 1 else put(self, step, identity)

    def remove_others(self, name):
        refuse(name) if "global_step_2" in name else remove(self, name)

    monkeypatch.setattr(CheckpointTrash, "move", put_others)
    monkeypatch.setattr(CheckpointTrash, "remove", remove_others)
    (run.folder / staged(2, name="bbbb")).mkdir()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon((await run.removal()).run, LiveState(run.state))
        await until(lambda: run.steps == [1, 4] and not run.left_in_staging)
        await until(
            lambda: [path.name[:13] for path in (run.folder / TRASH).iterdir()] == ["global_step_2"]
        )
        await until(lambda: caplog.text.count("cannot be removed: [Errno 13]") == 1)
        tasks.cancel_scope.cancel()


async def test_a_reducer_removes_old_checkpoints_but_not_from_under_a_reader(
    publisher, log, redis_url, run_id, tmp_path
):
    folder = tmp_path / run_id

    def steps():
        return sorted(int(path.name[12:]) for path in folder.glob("global_step_*"))

    async def save(step):
        path = folder / staged(step)
        path.mkdir(parents=True)
        (path / "model.pt").write_text(str(step))
        await publisher.publish(committed(step, "checkpoint", registration("checkpoint")))
        at = f"{staged(step)}/model.pt"
        save = finished(step, f"s{step}", kind="checkpoint", path=at, nbytes=len(str(step)))
        await publisher.publish(save)

    def hold(step, run=run_id):
        return hold_checkpoint(run, step, redis_url=redis_url, checkpoint_root=tmp_path)

    async with reducer_task(redis_url, run_id, tmp_path, Policy(keep_checkpoints=1)):
        await save(1)
        await until(lambda: steps() == [1])
        async with hold(1) as checkpoint:
            assert checkpoint == folder / "global_step_1"
            await save(2)
            await save(3)
            await until(lambda: steps() == [1, 3])
            assert (checkpoint / "model.pt").read_text() == "1"
        await save(4)
        await until(lambda: steps() == [4])
    with raises(CheckpointHeld, fault="absent", folder=folder / "global_step_1"):
        async with hold(1):
            pass
    token, _ = await log.lead(5)
    await log.mark_deleting(token, [4])
    with raises(CheckpointHeld, run_id=run_id, step=4, fault="removing"):
        async with hold(4):
            pass
    with raises(InvalidRunId, run_id="../elsewhere"):
        async with hold(4, run="../elsewhere"):
            pass


async def test_what_the_reader_raises_is_raised_and_its_hold_is_gone(
    log, redis_url, run_id, tmp_path
):
    (tmp_path / run_id / "global_step_1").mkdir(parents=True)
    with pytest.raises(KeyError, match="mine"):
        async with hold_checkpoint(run_id, 1, redis_url=redis_url, checkpoint_root=str(tmp_path)):
            raise KeyError("mine")
    token, _ = await log.lead(5)
    assert await log.mark_deleting(token, [1]) == {1}


async def test_a_reader_that_was_too_slow_to_hold_on_is_told(log, redis_url, run_id, tmp_path):
    """Invariant 2 of checkpoint_lease.py."""
    (tmp_path / run_id / "global_step_1").mkdir(parents=True)
    token, _ = await log.lead(5)

    async def read_for_long():
        options = {"redis_url": redis_url, "checkpoint_root": tmp_path, "lease": 0.4}
        async with hold_checkpoint(run_id, 1, **options):
            await log._redis.delete(log.keys.holds)  # as if it had lapsed
            await log.mark_deleting(token, [1])
            await anyio.sleep(20)

    with raises(CheckpointHeld, run_id=run_id, step=1, fault="removed"):
        await read_for_long()


async def test_a_reader_that_stood_still_while_its_checkpoint_was_removed_is_told(
    redis_url, run_id, tmp_path
):
    folder = tmp_path / run_id / "global_step_1"
    folder.mkdir(parents=True)

    async def read_after_a_long_stop():
        async with hold_checkpoint(run_id, 1, redis_url=redis_url, checkpoint_root=tmp_path):
            folder.rmdir()  # and by now its mark is gone: the next hold is granted again

    with raises(CheckpointHeld, run_id=run_id, step=1, fault="removed"):
        await read_after_a_long_stop()


async def test_a_reader_is_told_that_its_checkpoint_was_replaced(redis_url, run_id, tmp_path):
    """Invariant 3 of checkpoint_lease.py."""
    folder = tmp_path / run_id / "global_step_1"
    folder.mkdir(parents=True)

    async def read_while_it_is_saved_again():
        async with hold_checkpoint(run_id, 1, redis_url=redis_url, checkpoint_root=tmp_path):
            folder.rename(tmp_path / "aside")
            folder.mkdir()

    with raises(CheckpointHeld, run_id=run_id, step=1, fault="replaced"):
        await read_while_it_is_saved_again()
