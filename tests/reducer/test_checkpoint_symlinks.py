"""Nothing outside a run's folder is written or removed, whatever links are put into it."""

import os
import socket
from pathlib import Path

import pytest

from tests.support.checkpoint_runs import Run, staged
from tests.support.errors import assert_attributes
from tests.support.event_histories import History, committed, finished, registration
from tests.support.pipeline import reducer_task, until
from trinity_events.archive import Archive, Header, record_run
from trinity_events.archive.format import lines_written
from trinity_events.checkpoints.layout import TRASH
from trinity_events.core import plan_files
from trinity_events.log import Entry, Stream
from trinity_events.reducer import CheckpointFiles, Policy, ReducerTimeouts
from trinity_events.reducer.log_retention import LogRetention

MADE_FROM = ".made_from"


@pytest.fixture
def precious(tmp_path):
    """A folder of the same user beside the run's, with a file and a folder."""
    folder = tmp_path / "precious"
    (folder / "thesis").mkdir(parents=True)
    (folder / "thesis" / "chapter").write_text("one")
    (folder / "notes").write_text("mine")
    return folder


@pytest.fixture
def untouched(precious):
    """Fails when anything in that folder is another than before."""

    def content():
        return {path: path.is_file() and path.read_text() for path in precious.rglob("*")}

    before = content()
    yield precious
    assert content() == before


A, B = staged(7, name="a"), staged(7, name="b")
WEIGHTS = "weights"


def saved(path, kind, save_id):
    return finished(7, save_id, kind=kind, path=path, nbytes=len(WEIGHTS))


def checkpoint(history, folder):
    history.add(committed(7, "checkpoint", registration("checkpoint")))
    history.add(saved(f"{folder}/actor/optim.pt", "checkpoint", "save-checkpoint"))


def write(path: Path, text: str = WEIGHTS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


async def test_nothing_is_removed_through_a_link_in_the_place_of_the_trash(
    tmp_path, untouched, caplog
):
    run = Run(tmp_path, keep=1, restore_grace=-1.0)
    for step in (1, 2):
        run.save(step)
    (run.folder / TRASH).symlink_to(untouched)
    remover = await run.removal()
    await remover.clean_up(run.state)
    assert run.steps == [1, 2]
    assert_attributes(remover._faults[0], path=str(run.folder / TRASH), fault="link")


async def test_a_reducer_says_that_its_trash_is_a_link_and_removes_nothing(
    publisher, redis_url, run_id, tmp_path, untouched, caplog
):
    policy = Policy(timeouts=ReducerTimeouts(restore_grace=-1.0))
    (tmp_path / run_id).mkdir()
    (tmp_path / run_id / TRASH).symlink_to(untouched)
    async with reducer_task(redis_url, run_id, tmp_path, policy):
        await until(lambda: "is a link, which is not followed" in caplog.text)


async def test_of_the_trash_only_what_was_moved_there_is_removed(tmp_path):
    run = Run(tmp_path, keep=1, restore_grace=-1.0)
    for step in (1, 2):
        run.save(step)
    write(run.folder / TRASH / "by-hand" / "file")
    write(run.folder / TRASH / "global_step_9.17.3" / "file")
    await run.clean_up()
    assert run.steps == [2]
    assert [path.name for path in (run.folder / TRASH).iterdir()] == ["by-hand"]


def test_the_mark_of_a_staged_folder_is_written_through_no_link(tmp_path, untouched):
    files, history = CheckpointFiles(tmp_path, "run"), History()
    checkpoint(history, A)
    write(files.folder / A / "actor/optim.pt")
    (files.folder / A / MADE_FROM).symlink_to(untouched / "notes")
    files.reconcile(plan_files(history.fold()[0].state))
    mark = files.folder / "global_step_7" / MADE_FROM
    assert not mark.is_symlink()
    assert mark.read_text() == A


@pytest.mark.parametrize("place", ["", ".staging", A])
def test_nothing_is_promoted_through_a_link(tmp_path, untouched, place, caplog):
    files, history = CheckpointFiles(tmp_path, "run"), History()
    checkpoint(history, A)
    (untouched / "thesis" / "actor").mkdir()
    link = files.folder / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(untouched if place != A else untouched / "thesis")
    files.reconcile(plan_files(history.fold()[0].state))
    assert not (untouched / "thesis" / MADE_FROM).exists()
    assert not (files.folder / "global_step_7").exists()
    assert "is a link" in caplog.text or "leads out of" in caplog.text
    (untouched / "thesis" / "actor").rmdir()


def test_files_are_taken_over_from_a_state_dict_into_no_folder_that_is_a_link(
    tmp_path, untouched, caplog
):
    files, history = CheckpointFiles(tmp_path, "run"), History()
    history.add(committed(7, "state_dict", registration()))
    history.add(saved(f"{A}/actor/model.pt", "state_dict", "save-state-dict"))
    write(files.folder / A / "actor/model.pt")
    files.reconcile(plan_files(history.fold()[0].state))
    checkpoint(history, B)
    write(files.folder / B / "optim.pt")
    (files.folder / B / "actor").symlink_to(untouched)
    files.reconcile(plan_files(history.fold()[0].state))
    assert not (untouched / "model.pt").exists()
    assert "actor is a link" in caplog.text


def test_the_temporary_name_of_an_iteration_file_cannot_be_guessed(tmp_path, untouched):
    files, history = CheckpointFiles(tmp_path, "run"), History()
    history.add(committed(7, "checkpoint", registration("checkpoint")))
    history.add(finished(7, kind="checkpoint"))
    write(files.folder / "global_step_7/model.pt")
    name = "latest_checkpointed_iteration.txt"
    guessed = files.folder / f".{name}.{socket.gethostname()}-{os.getpid()}"
    guessed.symlink_to(untouched / "notes")
    (files.folder / name).symlink_to(untouched / "notes")
    files.reconcile(plan_files(history.fold()[0].state))
    assert (files.folder / name).read_text() == "7"
    assert not (files.folder / name).is_symlink()


def test_a_pipe_in_the_place_of_an_iteration_file_holds_nothing_up(tmp_path):
    files, history = CheckpointFiles(tmp_path, "run"), History()
    history.add(committed(7, "checkpoint", registration("checkpoint")))
    history.add(finished(7, kind="checkpoint"))
    write(files.folder / "global_step_7/model.pt")
    path = files.folder / "latest_checkpointed_iteration.txt"
    os.mkfifo(path)
    files.reconcile(plan_files(history.fold()[0].state))
    assert path.read_text() == "7"


async def test_a_staged_folder_that_is_left_behind_is_removed_but_no_link_in_it_followed(
    tmp_path, untouched
):
    run = Run(tmp_path, staged_grace=-1.0)
    run.save(1)
    stale_folder = run.folder / staged(1, name="bbbb")
    write(stale_folder / "actor" / "model.pt")
    (stale_folder / "link").symlink_to(untouched)
    await run.clean_up()
    assert run.left_in_staging == []


async def test_the_log_is_archived_through_no_link(log, run_id, tmp_path, untouched, caplog):
    archive = Archive(tmp_path / run_id, run_id)
    (untouched / ".events.1-0.2-0.2.jsonl.part").touch()
    archive.folder.parent.mkdir()
    archive.folder.symlink_to(untouched)
    await log.append(b"one")
    token, _ = await log.lead(60)
    retention = LogRetention(log, archive, token)
    await retention.begin()
    assert not await retention(await log.last_id())
    assert f"{archive.folder} is a link" in caplog.text
    assert (untouched / ".events.1-0.2-0.2.jsonl.part").exists()
    (untouched / ".events.1-0.2-0.2.jsonl.part").unlink()


def test_a_segments_temporary_name_cannot_be_guessed(tmp_path, untouched):
    archive = Archive(tmp_path / "run", "run")
    archive.folder.mkdir(parents=True)
    name = f".events.1-0.1-0.1.jsonl.{socket.gethostname()}-{os.getpid()}"
    (archive.folder / name).symlink_to(untouched / "notes")
    archive.add(Stream.EVENTS, [Entry("1-0", b"one")])
    assert [entry.payload for entry in archive.read(Stream.EVENTS)] == [b"one"]


async def test_an_export_follows_no_link_that_was_put_where_it_writes(log, tmp_path, untouched):
    for name in (".run.jsonl.part", f".run.jsonl.{socket.gethostname()}-{os.getpid()}"):
        (tmp_path / name).symlink_to(untouched / "notes")
    await log.append(b"one")
    await record_run(log, tmp_path / "run.jsonl")
    with lines_written(tmp_path / "other.jsonl", Header(run_id="r")):
        [part] = tmp_path.glob(".other.jsonl.*")
        assert part.name != f".other.jsonl.{socket.gethostname()}-{os.getpid()}"
