"""The checkpoint directory follows the state."""

from pathlib import Path

import pytest

from tests.support.checkpoint_runs import staged
from tests.support.errors import raises
from tests.support.event_histories import History, committed, finished, registration
from trinity_events.checkpoints.layout import parse_staged_name
from trinity_events.core import FilePlan, IterationFile, Promotion, plan_files
from trinity_events.errors import CheckpointRootUnusable
from trinity_events.reducer import CheckpointFiles, writable_root
from trinity_schemas import RunOpened, RunResumed, StepRef


def write(folder: Path, relative: str) -> None:
    path = folder / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(relative)


@pytest.fixture
def files(tmp_path):
    return CheckpointFiles(tmp_path, "run")


def save(history: History, path: str, kind: str = "state_dict", **how) -> None:
    """A save that wrote its own path into its file, as :func:`write` does."""
    step = parse_staged_name(path.split("/")[1]).step
    history.add(finished(step, path=path, kind=kind, nbytes=len(path), **how))


def checkpoint(history: History, step: int, attempt: str, epoch: int = 1) -> None:
    both = registration("state_dict"), registration("checkpoint")
    history.add(committed(step, "checkpoint", *both))
    for kind, name in (("state_dict", "model.pt"), ("checkpoint", "optim.pt")):
        save(history, f"{staged(step, epoch, attempt)}/actor/{name}", kind)


def write_checkpoint(files: CheckpointFiles, step: int, attempt: str, epoch: int = 1) -> None:
    for name in ("model.pt", "optim.pt"):
        write(files.folder, f"{staged(step, epoch, attempt)}/actor/{name}")


def reconcile(files: CheckpointFiles, history: History) -> None:
    files.reconcile(plan_files(history.fold()[0].state))


def named(files: CheckpointFiles, kind: str = "checkpointed") -> str:
    return (files.folder / f"latest_{kind}_iteration.txt").read_text()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_ready_checkpoint_gets_its_name_and_both_files_name_it(files):
    history = History()
    checkpoint(history, 7, "a")
    write_checkpoint(files, 7, "a")
    reconcile(files, history)
    assert names(files.folder / "global_step_7/actor") == ["model.pt", "optim.pt"]
    assert [named(files), named(files, "state_dict")] == ["7", "7"]


def test_nothing_moves_before_the_checkpoint_is_whole(files):
    history = History()
    checkpoint(history, 7, "a")
    history.entries.pop()
    write(files.folder, f"{staged(7, name='a')}/actor/model.pt")
    reconcile(files, history)
    assert (files.folder / staged(7, name="a")).is_dir()
    assert names(files.folder) == [".staging"]


def test_a_checkpoint_takes_the_place_of_the_state_dict_of_its_step(files):
    model, optimizer = (f"{staged(7, name=name)}/actor" for name in ("a", "b"))
    history = History()
    history.add(committed(7, "state_dict", registration()))
    save(history, f"{model}/model.pt")
    write(files.folder, f"{model}/model.pt")
    reconcile(files, history)
    assert (files.folder / "global_step_7/actor/model.pt").is_file()
    history.add(committed(7, "checkpoint", registration("checkpoint")))
    save(history, f"{optimizer}/optim.pt", "checkpoint")
    write(files.folder, f"{optimizer}/optim.pt")
    reconcile(files, history)
    actor = files.folder / "global_step_7/actor"
    assert names(actor) == ["model.pt", "optim.pt"]
    assert (actor / "model.pt").read_text() == f"{model}/model.pt"
    assert names(files.folder / ".staging") == []
    assert [named(files), named(files, "state_dict")] == ["7", "7"]


@pytest.mark.parametrize("older", [False, True], ids=["alone", "beside an earlier epoch's"])
def test_a_checkpoint_takes_over_a_state_dict_that_has_no_name_yet(files, older):
    """Both may be ready before the folder of the first one is renamed."""
    if older:
        write(files.folder, "global_step_7/actor/old.pt")
        write(files.folder, "global_step_7/.made_from")
    model, optimizer = (f"{staged(7, name=name)}/actor" for name in ("a", "b"))
    history = History()
    history.add(committed(7, "state_dict", registration()))
    save(history, f"{model}/model.pt")
    history.add(committed(7, "checkpoint", registration("checkpoint")))
    save(history, f"{optimizer}/optim.pt", "checkpoint")
    write(files.folder, f"{model}/model.pt")
    write(files.folder, f"{optimizer}/optim.pt")
    reconcile(files, history)
    reconcile(files, history)
    assert names(files.folder / "global_step_7/actor") == ["model.pt", "optim.pt"]
    replaced = f"{staged(7, name='b').removeprefix('.staging/')}.replaced_global_step_7"
    assert names(files.folder / ".staging") == ([replaced] if older else [])


def test_what_a_late_writer_leaves_replaces_nothing(files):
    history = History()
    checkpoint(history, 7, "a")
    write_checkpoint(files, 7, "a")
    reconcile(files, history)
    write(files.folder, f"{staged(7, name='a')}/actor/late.pt")
    reconcile(files, history)
    assert names(files.folder / "global_step_7/actor") == ["model.pt", "optim.pt"]


@pytest.mark.parametrize("opening", [RunOpened(), RunResumed(step=7), RunResumed(step=6)])
def test_a_checkpoint_that_was_ready_when_an_epoch_opened_still_gets_its_name(files, opening):
    history = History()
    for step in (6, 7):
        checkpoint(history, step, "a")
        write_checkpoint(files, step, "a")
    history.add(opening, by="second", epoch=2)
    reconcile(files, history)
    for step in (6, 7):
        assert (files.folder / f"global_step_{step}/actor/optim.pt").is_file()
    assert named(files) == str(getattr(opening, "step", 7))


def test_a_resume_never_points_to_what_is_not_there(files):
    history = History()
    checkpoint(history, 7, "a")
    history.add(RunResumed(step=5), by="second", epoch=2)
    reconcile(files, history)
    assert not (files.folder / "latest_checkpointed_iteration.txt").exists()


def test_a_superseded_checkpoint_is_kept_but_not_pointed_to(files):
    history = History()
    for step in (2, 1):
        checkpoint(history, step, "a")
        write_checkpoint(files, step, "a")
    reconcile(files, history)
    assert (files.folder / "global_step_1").is_dir()
    assert named(files) == "2"


def test_a_resume_writes_the_step_it_resumes_from(files):
    history = History()
    checkpoint(history, 105, "a")
    history.add(RunResumed(step=100), by="second", epoch=2)
    write(files.folder, "global_step_100/actor/model.pt")
    reconcile(files, history)
    assert named(files) == "100"


@pytest.mark.parametrize("garbage", ["", "7 is what it was", "\x00", "106"])
def test_a_garbled_iteration_file_is_put_right(files, garbage):
    history = History()
    checkpoint(history, 105, "a")
    write(files.folder, "global_step_105/actor/model.pt")
    (files.folder / "latest_checkpointed_iteration.txt").write_text(garbage)
    reconcile(files, history)
    assert named(files) == "105"


def test_reconciling_again_changes_nothing(files):
    history = History()
    checkpoint(history, 7, "a")
    write_checkpoint(files, 7, "a")
    plan = plan_files(history.fold()[0].state)
    files.reconcile(plan)
    before = {path: path.stat().st_mtime_ns for path in files.folder.rglob("*")}
    files.reconcile(plan)
    assert before == {path: path.stat().st_mtime_ns for path in files.folder.rglob("*")}


def test_an_iteration_file_never_names_a_checkpoint_that_is_not_there(files, caplog):
    history = History()
    checkpoint(history, 7, "a")
    reconcile(files, history)  # nothing was written to the staged folder
    assert not (files.folder / "latest_checkpointed_iteration.txt").exists()
    assert "global_step_7 is not there" in caplog.text


def test_the_checkpoint_of_an_earlier_epoch_is_kept_aside(files):
    history = History()
    checkpoint(history, 7, "a")
    write_checkpoint(files, 7, "a")
    reconcile(files, history)
    history.epoch = 2
    history.add(RunOpened(), by="second")
    history.add(committed(7, "state_dict", registration()), by="second")
    path = f"{staged(7, 2, 'b')}/actor/model.pt"
    history.add(finished(7, path=path, nbytes=len(path)), by="second")
    write(files.folder, path)
    reconcile(files, history)
    assert (files.folder / "global_step_7/actor/model.pt").is_file()
    assert (files.folder / f"{staged(7, 2, 'b')}.replaced_global_step_7/actor/optim.pt").is_file()


@pytest.mark.parametrize("path", [".staging//x", ".staging/./x", ".staging/../x", ".staging"])
def test_a_path_can_never_name_the_whole_staging_folder(path):
    history = History()
    history.add(committed(1, "state_dict", registration()))
    history.add(finished(1, path=path))
    assert plan_files(history.fold()[0].state).promotions == ()


@pytest.mark.parametrize("folder", ["../other", ".staging/..", "/etc", staged(1, name="beef")])
def test_a_path_that_leaves_the_run_is_not_used(files, tmp_path, folder, caplog):
    outside = tmp_path / "other"
    write(outside, "precious")
    (files.folder / ".staging").mkdir(parents=True)
    (files.folder / staged(1, name="beef")).symlink_to(outside)
    files.reconcile(FilePlan(promotions=(Promotion(1, folder),), iterations=()))
    assert (outside / "precious").read_text() == "precious"
    assert not (files.folder / "global_step_1").exists()
    assert "leads out of" in caplog.text


def test_a_path_that_is_none_keeps_the_rest_from_nothing(files, caplog):
    good = staged(2)
    write(files.folder / good, "weights")
    plan = FilePlan(promotions=(Promotion(1, ".staging/bad\0"), Promotion(2, good)), iterations=())
    files.reconcile(plan)
    assert (files.folder / "global_step_2").is_dir()
    assert r"path '.staging/bad\x00' is no path and is not used" in caplog.text


def test_one_fault_does_not_keep_the_rest_from_being_done(files, caplog):
    write(files.folder, "global_step_1/model.pt")
    name = "latest_state_dict_iteration.txt"
    plan = FilePlan(
        promotions=(Promotion(1, "../x"),),
        iterations=(IterationFile(name, "state_dict", StepRef(1, 1)),),
    )
    for _ in range(3):
        files.reconcile(plan)
    assert (files.folder / name).read_text() == "1"
    assert len(caplog.records) == 1, "said once, not every second"


def test_the_fault_of_a_file_that_is_planned_no_more_is_forgotten(files):
    write(files.folder, ".staging")  # a file, where a folder belongs
    for planned in ((".staging/a",), (".staging/b",), ()):
        promotions = tuple(Promotion(1, path) for path in planned)
        files.reconcile(FilePlan(promotions=promotions, iterations=()))
        assert [fault.partition(" ")[0] for fault in files.faults] == list(planned)


def test_a_root_that_is_a_file_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with raises(CheckpointRootUnusable, root=tmp_path / "file" / "below", reason="Not a directory"):
        writable_root(tmp_path / "file" / "below")


def test_a_root_that_cannot_be_written_is_refused_in_one_sentence():
    with raises(CheckpointRootUnusable, root=Path("/proc/checkpoints")):
        writable_root(Path("/proc/checkpoints"))
