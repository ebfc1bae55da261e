"""The state of the trainer's loop in a checkpoint: written whole, and read or refused."""

import hashlib
import json

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from trinity_events.checkpoints.layout import TRAINER_STATE
from trinity_events.core.ledger import Ledger
from trinity_schemas import TrainedLedger
from trinity_workers.trainer.state import (
    TrainerState,
    UnusableTrainerState,
    read_trainer_state,
    write_trainer_state,
)

STEP = 7
LEDGER = TrainedLedger(
    step=STEP,
    mark=20,
    next=30,
    settled=((22, 24), (29, 29)),
    trained=22,
    dropped={"filtered": 1, "attempts": 1},
    fingerprint="sha256:" + "1" * 64,
)
STATE = TrainerState(step=STEP, ledger=LEDGER, metrics={"reward": 0.1, "loss": -1e-9})
WAY_OUT = "begin anew with --fresh, or resume from another checkpoint"


@pytest.fixture
def folder(tmp_path):
    """A checkpoint's folder, which the writer makes."""
    return tmp_path / "step-7"


@pytest.fixture
def path(folder):
    write_trainer_state(folder / TRAINER_STATE, STATE)
    return folder / TRAINER_STATE


def refused(folder, step=STEP):
    with pytest.raises(UnusableTrainerState) as caught:
        read_trainer_state(folder, step)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(WAY_OUT)
    return str(caught.value)


def test_what_was_written_is_read(folder, path):
    read = read_trainer_state(folder, STEP)
    assert read == STATE
    assert read.ledger.digest == LEDGER.digest
    assert [file.name for file in folder.iterdir()] == [path.name], "no partial file is left"


def test_a_ledger_goes_on_where_the_checkpoints_did(folder, path):
    restored = Ledger.restored(read_trainer_state(folder, STEP).ledger)
    assert restored.open_ordinals() == [20, 21, 25, 26, 27, 28]
    assert restored.to_contract(STEP) == LEDGER


def test_the_file_is_plain_text_with_the_same_bytes_for_the_same_state(folder, path):
    assert json.loads(path.read_text())["ledger"]["dropped"] == LEDGER.dropped
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    write_trainer_state(path, STATE)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


def test_a_later_state_takes_the_place_of_an_earlier_one(folder, path):
    later = msgspec.structs.replace(
        STATE, step=8, ledger=msgspec.structs.replace(LEDGER, step=8, trained=23)
    )
    write_trainer_state(path, later)
    assert read_trainer_state(folder, 8) == later


def test_a_write_that_fails_leaves_the_earlier_state_alone(folder, path, monkeypatch):
    def full_disk(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trinity_workers.storage.durable_files.os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_trainer_state(path, msgspec.structs.replace(STATE, metrics={}))
    monkeypatch.undo()
    assert read_trainer_state(folder, STEP) == STATE
    assert [file.name for file in folder.iterdir()] == [path.name]


def test_a_checkpoint_without_the_state_is_refused(folder):
    message = refused(folder)
    assert message.startswith(f"the checkpoint of step 7 has no {folder / TRAINER_STATE}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: b"", "truncated"),
        (lambda raw: raw[: len(raw) // 2], "truncated"),
        (lambda raw: b"\x00" * len(raw), "malformed"),
        (lambda raw: raw.replace(b'"mark": 20', b'"mark": "20"'), "Expected `int`"),
        (lambda raw: raw.replace(b'"mark": 20', b'"mark": 22'), "the mark 22 has a fate"),
        (lambda raw: raw.replace(b'"mark": 20,', b""), "missing required field `mark`"),
        (lambda raw: raw.replace(b"sha256:", b"SHA:"), "Expected `str` matching regex"),
    ],
    ids=["empty", "cut-off", "zeros", "type", "contradiction", "field", "digest"],
)
def test_a_damaged_state_is_refused_and_its_file_named(folder, path, damage, message):
    raw = path.read_bytes()
    damaged = damage(raw)
    assert damaged != raw
    path.write_bytes(damaged)
    assert f"{path} cannot be read (" in refused(folder)
    assert message in refused(folder)


def test_a_folder_in_place_of_the_file_is_refused(folder):
    (folder / TRAINER_STATE).mkdir(parents=True)
    assert "cannot be read ([Errno 21] Is a directory" in refused(folder)


def test_the_state_of_another_step_is_refused(folder, path):
    assert f"{path} is of step 7, not of 8" in refused(folder, 8)
    contradictory = msgspec.structs.replace(STATE, ledger=msgspec.structs.replace(LEDGER, step=6))
    write_trainer_state(path, contradictory)
    assert f"{path} is of step" in refused(folder)
