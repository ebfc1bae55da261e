"""The checkpoint directory follows the state."""

from pathlib import Path

import pytest

from tests.support.event_histories import History, committed, finished, registration
from trinity_events.core import FilePlan, IterationFile, Promotion, plan_files
from trinity_events.errors import CheckpointRootUnusable
from trinity_events.reducer import CheckpointFiles, writable_root
from trinity_schemas import RunOpened, RunResumed


def write(folder: Path, relative: str) -> None:
    path = folder / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(relative)


@pytest.fixture
def files(tmp_path):
    return CheckpointFiles(tmp_path, "run")


def checkpoint(history: History, step: int, attempt: str) -> None:
    both = registration("state_dict"), registration("checkpoint")
    history.add(committed(step, "checkpoint", *both))
    for kind, name in (("state_dict", "model.pt"), ("checkpoint", "optim.pt")):
        history.add(finished(step, kind=kind, path=f".staging/{attempt}/actor/{name}"))


def test_a_ready_checkpoint_gets_its_name_and_both_files_name_it(files):
    history = History()
    checkpoint(history, 7, "a")
    for name in ("model.pt", "optim.pt"):
        write(files.folder, f".staging/a/actor/{name}")
    files.reconcile(plan_files(history.fold()[0].state))
    assert sorted(p.name for p in (files.folder / "global_step_7/actor").iterdir()) == [
        "model.pt",
        "optim.pt",
    ]
    for name in ("latest_checkpointed_iteration.txt", "latest_state_dict_iteration.txt"):
        assert (files.folder / name).read_text() == "7"


def test_nothing_moves_before_the_checkpoint_is_whole(files):
    history = History()
    checkpoint(history, 7, "a")
    history.entries.pop()
    write(files.folder, ".staging/a/actor/model.pt")
    files.reconcile(plan_files(history.fold()[0].state))
    assert (files.folder / ".staging/a").is_dir()
    assert sorted(path.name for path in files.folder.iterdir()) == [".staging"]


def test_a_checkpoint_takes_the_place_of_the_state_dict_of_its_step(files):
    history = History()
    history.add(committed(7, "state_dict", registration()))
    history.add(finished(7, path=".staging/a/actor/model.pt"))
    write(files.folder, ".staging/a/actor/model.pt")
    files.reconcile(plan_files(history.fold()[0].state))
    assert (files.folder / "global_step_7/actor/model.pt").is_file()
    history.add(committed(7, "checkpoint", registration("checkpoint")))
    history.add(finished(7, kind="checkpoint", path=".staging/b/actor/optim.pt"))
    write(files.folder, ".staging/b/actor/optim.pt")
    files.reconcile(plan_files(history.fold()[0].state))
    actor = files.folder / "global_step_7/actor"
    assert sorted(path.name for path in actor.iterdir()) == ["model.pt", "optim.pt"]
    assert (actor / "model.pt").read_text() == ".staging/a/actor/model.pt"
    assert list((files.folder / ".staging").iterdir()) == []


@pytest.mark.parametrize("older", [False, True], ids=["alone", "beside an earlier epoch's"])
def test_a_checkpoint_takes_over_a_state_dict_that_has_no_name_yet(files, older):
    """Both may be ready before the folder of the first one is renamed."""
    if older:
        write(files.folder, "global_step_7/actor/old.pt")
        write(files.folder, "global_step_7/.made_from")
    history = History()
    history.add(committed(7, "state_dict", registration()))
    history.add(finished(7, path=".staging/a/actor/model.pt"))
    history.add(committed(7, "checkpoint", registration("checkpoint")))
    history.add(finished(7, kind="checkpoint", path=".staging/b/actor/optim.pt"))
    write(files.folder, ".staging/a/actor/model.pt")
    write(files.folder, ".staging/b/actor/optim.pt")
    plan = plan_files(history.fold()[0].state)
    files.reconcile(plan)
    files.reconcile(plan)
    actor = files.folder / "global_step_7/actor"
    assert sorted(path.name for path in actor.iterdir()) == ["model.pt", "optim.pt"]
    left = [path.name for path in (files.folder / ".staging").iterdir()]
    assert left == (["b.replaced_global_step_7"] if older else [])


def test_what_a_late_writer_leaves_replaces_nothing(files):
    history = History()
    checkpoint(history, 7, "a")
    write(files.folder, ".staging/a/actor/optim.pt")
    plan = plan_files(history.fold()[0].state)
    files.reconcile(plan)
    write(files.folder, ".staging/a/actor/late.pt")
    files.reconcile(plan)
    actor = files.folder / "global_step_7/actor"
    assert [path.name for path in actor.iterdir()] == ["optim.pt"]


@pytest.mark.parametrize("opening", [RunOpened(), RunResumed(step=7), RunResumed(step=6)])
def test_a_checkpoint_that_was_ready_when_an_epoch_opened_still_gets_its_name(files, opening):
    history = History()
    for step in (6, 7):
        checkpoint(history, step, f"attempt-{step}")
        write(files.folder, f".staging/attempt-{step}/actor/optim.pt")
    history.add(opening, by="second", epoch=2)
    files.reconcile(plan_files(history.fold()[0].state))
    for step in (6, 7):
        assert (files.folder / f"global_step_{step}/actor/optim.pt").is_file()
    latest = (files.folder / "latest_checkpointed_iteration.txt").read_text()
    assert latest == str(getattr(opening, "step", 7))


def test_a_resume_never_points_to_what_is_not_there(files):
    history = History()
    checkpoint(history, 7, "a")
    history.add(RunResumed(step=5), by="second", epoch=2)
    files.reconcile(plan_files(history.fold()[0].state))
    assert not (files.folder / "latest_checkpointed_iteration.txt").exists()


def test_a_superseded_checkpoint_is_kept_but_not_pointed_to(files):
    history = History()
    checkpoint(history, 2, "two")
    checkpoint(history, 1, "one")
    for name in ("one", "two"):
        write(files.folder, f".staging/{name}/actor/model.pt")
    files.reconcile(plan_files(history.fold()[0].state))
    assert (files.folder / "global_step_1").is_dir()
    assert (files.folder / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_a_resume_writes_the_step_it_resumes_from(files):
    history = History()
    checkpoint(history, 105, "a")
    history.add(RunResumed(step=100), by="second", epoch=2)
    write(files.folder, "global_step_100/actor/model.pt")
    files.reconcile(plan_files(history.fold()[0].state))
    assert (files.folder / "latest_checkpointed_iteration.txt").read_text() == "100"


@pytest.mark.parametrize("garbage", ["", "7 is what it was", "\x00", "106"])
def test_a_garbled_iteration_file_is_put_right(files, garbage):
    history = History()
    checkpoint(history, 105, "a")
    write(files.folder, "global_step_105/actor/model.pt")
    (files.folder / "latest_checkpointed_iteration.txt").write_text(garbage)
    files.reconcile(plan_files(history.fold()[0].state))
    assert (files.folder / "latest_checkpointed_iteration.txt").read_text() == "105"


def test_reconciling_again_changes_nothing(files):
    history = History()
    checkpoint(history, 7, "a")
    write(files.folder, ".staging/a/actor/model.pt")
    plan = plan_files(history.fold()[0].state)
    files.reconcile(plan)
    before = {path: path.stat().st_mtime_ns for path in files.folder.rglob("*")}
    files.reconcile(plan)
    assert before == {path: path.stat().st_mtime_ns for path in files.folder.rglob("*")}


def test_an_iteration_file_never_names_a_checkpoint_that_is_not_there(files, caplog):
    history = History()
    checkpoint(history, 7, "a")
    files.reconcile(plan_files(history.fold()[0].state))  # nothing was written to .staging/a
    assert not (files.folder / "latest_checkpointed_iteration.txt").exists()
    assert "global_step_7 is not there" in caplog.text


def test_the_checkpoint_of_an_earlier_epoch_is_kept_aside(files):
    history = History()
    checkpoint(history, 7, "old")
    write(files.folder, ".staging/old/actor/optim.pt")
    files.reconcile(plan_files(history.fold()[0].state))
    history.add(RunOpened(), by="second", epoch=2)
    history.add(committed(7, "state_dict", registration()), by="second", epoch=2)
    history.add(finished(7, path=".staging/new/actor/model.pt"), by="second", epoch=2)
    write(files.folder, ".staging/new/actor/model.pt")
    files.reconcile(plan_files(history.fold()[0].state))
    assert (files.folder / "global_step_7/actor/model.pt").is_file()
    assert (files.folder / ".staging/new.replaced_global_step_7/actor/optim.pt").is_file()


@pytest.mark.parametrize("path", [".staging//x", ".staging/./x", ".staging/../x", ".staging"])
def test_a_path_can_never_name_the_whole_staging_folder(path):
    history = History()
    history.add(committed(1, "state_dict", registration()))
    history.add(finished(1, path=path))
    assert plan_files(history.fold()[0].state).promotions == ()


@pytest.mark.parametrize("staged", ["../other", ".staging/..", "/etc", ".staging/link"])
def test_a_path_that_leaves_the_run_is_not_used(files, tmp_path, staged, caplog):
    outside = tmp_path / "other"
    write(outside, "precious")
    (files.folder / ".staging").mkdir(parents=True)
    (files.folder / ".staging/link").symlink_to(outside)
    files.reconcile(FilePlan(promotions=(Promotion(1, staged),), iterations=()))
    assert (outside / "precious").read_text() == "precious"
    assert not (files.folder / "global_step_1").exists()
    assert "leads out of" in caplog.text


def test_a_path_that_is_none_keeps_the_rest_from_nothing(files, caplog):
    write(files.folder / ".staging" / "good", "weights")
    plan = FilePlan(
        promotions=(Promotion(1, ".staging/bad\0"), Promotion(2, ".staging/good")), iterations=()
    )
    files.reconcile(plan)
    assert (files.folder / "global_step_2").is_dir()
    assert r"path '.staging/bad\x00' is no path and is not used" in caplog.text


def test_one_fault_does_not_keep_the_rest_from_being_done(files, caplog):
    plan = FilePlan(
        promotions=(Promotion(1, "../x"),),
        iterations=(IterationFile("latest_state_dict_iteration.txt", 1),),
    )
    for _ in range(3):
        files.reconcile(plan)
    assert (files.folder / "latest_state_dict_iteration.txt").read_text() == "1"
    assert len(caplog.records) == 1, "said once, not every second"


def test_the_fault_of_a_file_that_is_planned_no_more_is_forgotten(files):
    write(files.folder, ".staging")  # a file, where a folder belongs
    for staged in ((".staging/a",), (".staging/b",), ()):
        promotions = tuple(Promotion(1, one) for one in staged)
        files.reconcile(FilePlan(promotions=promotions, iterations=()))
        assert [one.partition(" ")[0] for one in files.faults] == list(staged)


def test_a_root_that_is_a_file_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointRootUnusable, match="cannot be written"):
        writable_root(tmp_path / "file" / "below")


def test_a_root_that_cannot_be_written_is_refused_in_one_sentence():
    with pytest.raises(CheckpointRootUnusable, match="choose another with --checkpoint-root"):
        writable_root(Path("/proc/checkpoints"))
