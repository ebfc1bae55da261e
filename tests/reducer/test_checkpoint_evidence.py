"""A step counts if its folder has the saves that the log speaks of, and not for its events."""

import json
from pathlib import Path

import pytest

from tests.support.checkpoint_runs import Run, staged
from tests.support.event_histories import committed, finished, registration
from trinity_events.checkpoints.layout import MADE_FROM, VERIFIED
from trinity_events.core import Promotion, SavedFile, plan_files
from trinity_events.reducer import CheckpointFiles
from trinity_events.reducer.checkpoint_evidence import (
    NotVerified,
    check_names,
    check_promotion,
    load_evidence,
)
from trinity_events.system.open_folder import OpenFolder

CHECKPOINT = "latest_checkpointed_iteration.txt"
STATE_DICT = "latest_state_dict_iteration.txt"


def invent(history, *steps, kind="checkpoint", path=None, nbytes=8):
    """Complete steps as the log has them, of saves that no process made."""
    for step in steps:
        save = finished(step, f"evil-{kind}-{step}", path, kind=kind, nbytes=nbytes)
        history.add(save, by="evil")
        history.add(committed(step, kind, registration(kind)), by="evil")


def reconcile(run):
    run.files.reconcile(plan_files(run.state))


def named(run, name=CHECKPOINT):
    return (run.folder / name).read_text()


@pytest.fixture
def run(tmp_path):
    """A run with the checkpoints of steps 1 and 2."""
    run = Run(tmp_path, keep=1)
    for step in (1, 2):
        run.save(step)
    return run


def test_a_folder_gets_its_mark_before_its_name(run):
    mark = json.loads((run.folder / "global_step_2" / VERIFIED).read_text())
    assert mark == {"epoch": 1, "step": 2, "kinds": ["checkpoint"], "saves": 1}


@pytest.mark.parametrize("path", [None, "global_step_90001/model.pt", staged(90_001)])
def test_an_invented_step_is_not_named_and_later_ones_are(run, path):
    invent(run.history, 90_001, path=path)
    reconcile(run)
    assert named(run) == "2"
    run.save(3)
    assert named(run) == "3"


async def test_an_invented_step_is_reported_with_its_number(run, caplog):
    invent(run.history, 90_001)
    for _ in range(2):
        reconcile(run)
    assert run.files.faults == {}, "a save that names no folder may have its files elsewhere"
    assert caplog.text.count("step 90001 has no verified files: ") == 1
    invent(run.history, 90_002, path=f"{staged(90_002)}/model.pt")
    for _ in range(2):
        reconcile(run)
    [fault] = run.files.faults.values()
    assert "step 90002 has no verified files: " in fault


def test_saves_without_a_path_are_reported_at_the_first_step_alone(run, caplog):
    for step in (3, 4, 5):
        invent(run.history, step)
        reconcile(run)
    assert [text.count("step 3 has no verified files: ") for text in caplog.messages] == [1]
    run.save(6)
    invent(run.history, 7)
    reconcile(run)
    assert len(caplog.messages) == 2, "files that went missing after a step that had some"


def test_an_iteration_file_that_names_no_folder_is_put_right(run):
    invent(run.history, 90_001)
    (run.folder / CHECKPOINT).write_text("90001")  # as version 0.1 wrote it
    reconcile(run)
    assert named(run) == "2"


async def test_the_folder_of_another_step_is_not_used_for_an_invented_one(tmp_path):
    run = Run(tmp_path, keep=1)
    run.save(1)
    folder = run.folder / staged(2)
    folder.mkdir(parents=True)
    (folder / "model.pt").write_text("1.2")
    invent(run.history, 90_001, path=f"{staged(2)}/model.pt", nbytes=3)
    reconcile(run)
    assert run.steps == [1]
    assert folder.is_dir()
    assert any("is of step 2 of epoch 1 by its name" in why for why in run.files.faults.values())
    invent(run.history, 2, path=f"{staged(2)}/model.pt", nbytes=3)  # by its own saves
    reconcile(run)
    assert run.steps == [1, 2]
    await run.clean_up()
    assert (run.steps, named(run)) == ([2], "2")


def test_no_file_is_linked_into_a_folder_of_another_step(tmp_path):
    run = Run(tmp_path)
    for step in (1, 2):
        (run.folder / staged(step)).mkdir(parents=True)
        (run.folder / staged(step) / f"{step}.pt").write_text("12345678")
    plan = plan_files(run.state)
    added = Promotion(2, staged(2), adds=staged(1), epoch=1, kinds=("checkpoint",))
    run.files.reconcile(type(plan)(promotions=(added,), iterations=()))
    assert [path.name for path in (run.folder / staged(2)).iterdir()] == ["2.pt"]
    assert run.steps == []


@pytest.mark.parametrize("epoch", [1, 3])
def test_the_folder_of_another_epoch_is_not_used(run, epoch):
    (run.folder / staged(3, epoch)).mkdir(parents=True)
    (run.folder / staged(3, epoch) / "model.pt").write_text("12345678")
    with pytest.raises(NotVerified) as error:
        check_names(Promotion(3, staged(3, epoch), epoch=2), run.folder)
    assert error.value.step == 3
    assert error.value.reason == f"is of step 3 of epoch {epoch} by its name"


@pytest.mark.parametrize("content", [None, "marks", "folder"])
async def test_a_folder_without_files_is_not_promoted(run, content):
    folder = run.folder / staged(3)
    folder.mkdir(parents=True)
    if content == "marks":
        (folder / MADE_FROM).write_text(staged(3))
    elif content == "folder":
        (folder / "actor").mkdir()
    invent(run.history, 3, path=staged(3), nbytes=0)
    reconcile(run)
    await run.clean_up()
    assert (run.steps, named(run)) == ([2], "2")


async def test_a_checkpoint_that_was_emptied_by_hand_is_not_counted(run):
    run.save(3)
    (run.folder / "global_step_3" / "model.pt").unlink()
    reconcile(run)
    await run.clean_up()
    assert (run.steps, named(run)) == ([2, 3], "2")


@pytest.mark.parametrize(
    ("saved", "on_disk", "reason"),
    [
        ("model.pt", {}, "is not there"),
        ("actor/model.pt", {}, "is not there"),
        ("model.pt/part", {"model.pt": 8}, "is not there"),
        ("model.pt", {"model.pt": 7}, "has 7 bytes, and 8 were saved"),
        ("model.pt", {"model.pt": 9}, "has 9 bytes, and 8 were saved"),
        ("actor", {"actor/0.pt": 3, "actor/1.pt": 4}, "has 7 bytes, and 8 were saved"),
        ("", {"0.pt": 3, "1.pt": 4}, "has 7 bytes, and 8 were saved"),
        ("actor", {"actor/0.pt": 3, "actor/deep/1.pt": 6}, None),
        ("", {"actor/0.pt": 8}, None),
    ],
)
def test_a_save_is_compared_by_path_and_size(tmp_path, saved, on_disk, reason):
    folder = tmp_path / staged(3)
    for name, nbytes in {"other": 1, **on_disk}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * nbytes)
    if saved == "":
        (folder / "other").unlink()
    promotion = Promotion(3, staged(3), epoch=1, saves=(SavedFile(saved, 8),))
    origin = check_names(promotion, tmp_path)
    with OpenFolder.at(folder) as opened:
        if reason is None:
            assert check_promotion(promotion, origin, opened).saves == 1
            return
        with pytest.raises(NotVerified) as error:
            check_promotion(promotion, origin, opened)
    assert (error.value.step, error.value.reason) == (3, reason)
    assert error.value.folder == folder / saved


def test_the_target_of_a_link_is_not_looked_at(tmp_path):
    folder = tmp_path / staged(3)
    (folder / "actor").mkdir(parents=True)
    for link in (folder / "model.pt", folder / "actor" / "base.pt"):
        link.symlink_to("/nowhere")
    saves = SavedFile("model.pt", 8), SavedFile("actor", 8)
    promotion = Promotion(3, staged(3), saves=saves)
    with OpenFolder.at(folder) as opened:
        assert check_promotion(promotion, check_names(promotion, tmp_path), opened).saves == 2


def test_a_checkpoint_with_a_short_file_gets_its_name_once_the_file_is_whole(run):
    model = run.folder / staged(3) / "model.pt"
    model.parent.mkdir(parents=True)
    model.write_text("short")
    invent(run.history, 3, path=f"{staged(3)}/model.pt")
    reconcile(run)
    assert (run.steps, named(run)) == ([1, 2], "2")
    assert any("has 5 bytes, and 8 were saved" in why for why in run.files.faults.values())
    model.write_text("12345678")
    reconcile(run)
    assert (run.steps, named(run), run.files.faults) == ([1, 2, 3], "3", {})


def test_a_file_that_a_late_attempt_wrote_again_counts_by_its_new_size(run):
    path = f"{staged(3)}/model.pt"
    (run.folder / staged(3)).mkdir(parents=True)
    (run.folder / path).write_text("123456789")
    invent(run.history, 3, path=path, nbytes=8)
    run.history.add(finished(3, "again", path, kind="checkpoint", nbytes=9), by="late")
    reconcile(run)
    assert run.steps == [1, 2, 3]


async def test_a_later_leader_counts_by_the_mark_and_checks_no_file_again(run, monkeypatch):
    model = run.folder / "global_step_2" / "model.pt"
    model.write_text("longer than it was")
    run.files = CheckpointFiles(run.folder.parent, run.folder.name)
    opened = []
    read = OpenFolder.read

    def note(self, name, limit):
        opened.append(name)
        return read(self, name, limit)

    monkeypatch.setattr(OpenFolder, "read", note)
    reconcile(run)
    await run.clean_up()
    assert run.steps == [2]
    assert set(opened) <= {CHECKPOINT, MADE_FROM, VERIFIED}


async def test_a_checkpoint_in_the_folder_of_a_state_dict_is_not_named_and_removes_none(tmp_path):
    run = Run(tmp_path, keep=1)
    run.save(1)
    folder = run.folder / staged(2)
    folder.mkdir(parents=True)
    (folder / "model.pt").write_text("12345678")
    invent(run.history, 2, kind="state_dict", path=f"{staged(2)}/model.pt")
    reconcile(run)
    assert (named(run), named(run, STATE_DICT)) == ("1", "2")
    invent(run.history, 2, path=f"{staged(2)}/model.pt")
    reconcile(run)
    await run.clean_up()
    assert (named(run), named(run, STATE_DICT), run.steps) == ("1", "2", [1, 2])
    assert "was verified as state_dict, and not as checkpoint" in str(run.files.faults)


def test_a_step_that_was_saved_in_place_is_named_once_its_files_are_there(tmp_path):
    run = Run(tmp_path)
    model = run.folder / "global_step_5" / "actor" / "model.pt"
    invent(run.history, 5, path="global_step_5/actor/model.pt")
    reconcile(run)
    assert not (run.folder / CHECKPOINT).exists()
    model.parent.mkdir(parents=True)
    model.write_text("short")
    reconcile(run)
    assert not (run.folder / CHECKPOINT).exists()
    model.write_text("12345678")
    reconcile(run)
    assert named(run) == "5"
    invent(run.history, 6)
    reconcile(run)
    assert named(run) == "5"


# --- folders of version 0.1 ----------------------------------------------------------------------


def make_unmarked(folder: Path, made_from: str | None = None) -> None:
    """Leave a folder as version 0.1 made it."""
    (folder / VERIFIED).unlink()
    if made_from is not None:
        (folder / MADE_FROM).write_text(made_from)


async def test_a_folder_of_version_0_1_gets_its_mark_at_the_first_look(run):
    for step in (1, 2):
        make_unmarked(run.folder / f"global_step_{step}")
    reconcile(run)
    await run.clean_up()
    assert (run.steps, named(run)) == ([2], "2")
    mark = json.loads((run.folder / "global_step_2" / VERIFIED).read_text())
    assert (mark["epoch"], mark["step"], mark["kinds"]) == (1, 2, ["checkpoint"])


async def test_later_events_do_not_change_what_a_folder_of_version_0_1_counts_as(tmp_path):
    run = Run(tmp_path, keep=1)
    run.save(1)
    folder = run.folder / staged(2)
    folder.mkdir(parents=True)
    (folder / "model.pt").write_text("12345678")
    invent(run.history, 2, kind="state_dict", path=f"{staged(2)}/model.pt")
    reconcile(run)
    make_unmarked(run.folder / "global_step_2")
    await run.clean_up()
    invent(run.history, 2)
    reconcile(run)
    await run.clean_up()
    assert (run.steps, named(run)) == ([1, 2], "1")


@pytest.mark.parametrize("made_from", [staged(1), ".staging/mine"])
async def test_a_folder_of_version_0_1_that_is_not_of_its_step_stays_and_counts_for_nothing(
    run, made_from, caplog
):
    make_unmarked(run.folder / "global_step_2", made_from)
    reconcile(run)
    removal = await run.removal()
    for _ in range(2):
        await removal.clean_up(run.state)
    assert (run.steps, named(run)) == ([1, 2], "1")
    assert caplog.text.count("it does not count as a checkpoint, and is not removed") == 1


@pytest.mark.parametrize("mark", ["", "no json", '{"epoch": 1}', '{"epoch": 1, "step": 1}'])
async def test_a_mark_that_is_damaged_or_of_another_step_is_no_evidence(run, mark):
    (run.folder / "global_step_2" / VERIFIED).write_text(mark)
    with OpenFolder.at(run.folder) as folder, pytest.raises(NotVerified):
        load_evidence(folder, 2, ("checkpoint",))
    await run.clean_up()
    assert run.steps == [1, 2]
