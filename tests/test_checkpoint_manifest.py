"""A manifest lists every file of a checkpoint, and whoever loads one compares them first."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.damage import DAMAGE, check, flip, restored
from trinity_events.checkpoints.layout import COMPLETING, MANIFEST, MANIFEST_PARTS, VERIFIED
from trinity_events.checkpoints.manifest import (
    FileSum,
    ManifestUnreadable,
    format_manifest,
    parse_manifest,
    saved_files,
    sums_below,
    write_manifest,
)
from trinity_events.checkpoints.verification import (
    CheckpointDamaged,
    ListedFile,
    divide,
    read_manifest,
    verify_files,
    with_older,
)
from trinity_workers.storage.load_verification import verify_checkpoint, verify_whole

FILES = {
    "actor/model_world_size_1_rank_0.pt": b"weights" * 1000,
    "actor/huggingface/config.json": b'{"model_type": "gpt2"}',
    "trainer_state.json": b'{"step": 5}',
}


def write_checkpoint(folder: Path, *, listed: bool = True) -> Path:
    """Write a small checkpoint, with its manifest."""
    for name, data in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    if listed:
        write_manifest(folder, sums_below([folder], folder))
    return folder


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "run" / "global_step_5")


def damage_of(folder: Path) -> CheckpointDamaged | None:
    try:
        verify_checkpoint(folder)
    except CheckpointDamaged as error:
        return error
    return None


@pytest.mark.processes
def test_sha256sum_checks_a_checkpoint_by_its_manifest(checkpoint):
    (checkpoint / "a \\ strange\nname").write_text("x")
    write_manifest(checkpoint, sums_below([checkpoint], checkpoint))

    def run() -> subprocess.CompletedProcess[str]:
        command = ["sha256sum", "--check", "--strict", MANIFEST]
        return subprocess.run(command, cwd=checkpoint, capture_output=True, text=True, check=False)

    assert run().returncode == 0
    assert run().stdout.count(": OK\n") == len(FILES) + 1
    flip(checkpoint / "trainer_state.json")
    assert run().returncode == 1
    assert "trainer_state.json: FAILED" in run().stdout


def test_a_manifest_is_read_as_it_was_written():
    names = ["a", "folder/b c", "back\\slash", "line\nbreak", "return\r", "\u2028", "\udcff"]
    sums = {name: FileSum(f"{number:064x}", number) for number, name in enumerate(names)}
    assert parse_manifest(format_manifest(sums)) == sums


@pytest.mark.parametrize("name", ["/etc/outside", "../outside", "a/../b", "a//b", "."])
def test_a_path_outside_of_the_checkpoint_is_refused(name):
    with pytest.raises(ManifestUnreadable) as raised:
        parse_manifest(format_manifest({name: FileSum("0" * 64, 1)}))
    assert repr(name) in raised.value.reason


def test_every_changed_byte_of_a_manifest_is_noticed(checkpoint):
    data = (checkpoint / MANIFEST).read_bytes()
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 0x01]) + data[at + 1 :]
        with pytest.raises(ManifestUnreadable):
            parse_manifest(changed)
    for length in range(len(data) - 1):
        with pytest.raises(ManifestUnreadable):
            parse_manifest(data[:length])


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_each_damage_to_each_file_names_the_file(checkpoint, name, kind):
    error = restored(checkpoint / name, DAMAGE[kind][0], lambda: damage_of(checkpoint))
    check(error, checkpoint / name, kind)
    assert (error.step, error.older) == (5, None)
    assert damage_of(checkpoint) is None


@pytest.mark.parametrize("kind", ["flip", "cut", "empty", "gone", "zeros"])
def test_a_damaged_manifest_is_named(checkpoint, kind):
    data = (checkpoint / MANIFEST).read_bytes()
    import hashlib

    digest = hashlib.sha256(data).hexdigest()
    (checkpoint / VERIFIED).write_text(f'{{"epoch":1,"step":5,"manifest":"sha256:{digest}"}}')
    assert damage_of(checkpoint) is None
    path = checkpoint / MANIFEST
    for folder in (checkpoint, checkpoint / "actor", checkpoint / "actor" / "huggingface"):
        error = restored(path, DAMAGE[kind][0], lambda at=folder: damage_of(at))
        assert error is not None
        assert error.path == path


def test_a_manifest_of_other_files_is_noticed_by_the_mark_of_the_reducer(checkpoint):
    (checkpoint / VERIFIED).write_text('{"epoch":1,"step":5,"manifest":"sha256:00"}')
    error = damage_of(checkpoint)
    assert error.path == checkpoint / MANIFEST
    (checkpoint / VERIFIED).write_text("{")
    assert damage_of(checkpoint).path == checkpoint / VERIFIED


def test_sizes_alone_do_not_show_a_flip_and_off_compares_nothing(checkpoint):
    flip(checkpoint / "trainer_state.json")
    verify_checkpoint(checkpoint, "size")
    verify_checkpoint(checkpoint, "full", only=["actor/model_world_size_1_rank_0.pt"])
    verify_checkpoint(checkpoint / "actor", "full")
    with pytest.raises(CheckpointDamaged):
        verify_checkpoint(checkpoint, "full", only=["trainer_state.json"])
    (checkpoint / "trainer_state.json").unlink()
    verify_checkpoint(checkpoint, "off")
    with pytest.raises(CheckpointDamaged):
        verify_checkpoint(checkpoint, "size")


def test_the_error_has_the_newest_older_checkpoint_that_is_whole(checkpoint):
    run = checkpoint.parent
    for step in (2, 3, 4, 6):
        write_checkpoint(run / f"global_step_{step}", listed=step != 4)
    flip(run / "global_step_3" / "trainer_state.json")
    flip(checkpoint / "actor" / "huggingface" / "config.json")
    error = pickle.loads(pickle.dumps(damage_of(checkpoint / "actor")))
    assert (error.step, error.older, error.command) == (5, 2, None)
    error = error.with_command("trinity-events train run.yaml --run a")
    assert error.command == "trinity-events train run.yaml --run a --from-step 2"
    elsewhere = CheckpointDamaged(Path("/elsewhere/file"), "is not there")
    assert with_older(elsewhere).older is None


def test_a_checkpoint_without_a_manifest_is_loaded_with_one_warning(tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "global_step_5", listed=False)
    with caplog.at_level(logging.WARNING):
        verify_checkpoint(folder)
    [record] = caplog.records
    assert str(folder) in record.getMessage()


def test_a_list_of_digests_above_a_folder_counts_only_if_it_lists_the_folder(tmp_path):
    write_checkpoint(tmp_path / "saved", listed=False)
    (tmp_path / MANIFEST).write_text(f"{'0' * 64}  download.tar\n")
    assert read_manifest(tmp_path / "saved") is None
    write_manifest(tmp_path, {"other": FileSum("0" * 64, 1)})
    assert read_manifest(tmp_path / "saved") is None


def test_a_manifest_further_out_counts_before_that_of_an_earlier_save_inside(checkpoint):
    write_manifest(checkpoint / "actor", {"old": FileSum("0" * 64, 1)})
    assert verify_files(checkpoint / "actor")
    assert read_manifest(checkpoint / "actor").root == checkpoint


def test_unfinished_files_and_marks_are_no_files_of_a_save(checkpoint):
    before = saved_files(checkpoint)
    for name in (".model.pt.tmp", ".SHA256SUMS.0123456789abcdef.part", VERIFIED):
        (checkpoint / "actor" / name).write_text("x")
    (checkpoint / MANIFEST_PARTS).mkdir()
    (checkpoint / MANIFEST_PARTS / "part").write_text("x")
    assert saved_files(checkpoint) == before


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_ranks_divide_the_files_and_each_is_read_by_one(parts):
    files = [
        ListedFile(Path(f"/{number}"), FileSum("", size))
        for number, size in enumerate([5, 900, 40, 40, 1, 300, 300])
    ]
    divided = divide(files, parts)
    assert sorted(file for part in divided for file in part) == sorted(files)
    sizes = [sum(file.sum.bytes for file in part) for part in divided]
    assert max(sizes) <= max(900, 1.34 * sum(sizes) / parts)


def hugging_face_list(folder: Path) -> None:
    import xxhash

    (folder / "XXH128SUMS").write_text(
        "".join(
            f"{xxhash.xxh3_128_hexdigest(path.read_bytes())}  {path.name}\n"
            for path in sorted(folder.iterdir())
        )
    )


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("later", [False, True], ids=["without-a-manifest", "completed-later"])
def test_a_hugging_face_folder_is_compared_with_its_own_list(tmp_path, kind, later):
    folder = write_checkpoint(tmp_path / "global_step_5", listed=later)
    model = folder / "actor" / "huggingface"
    (model / "config.json").write_text('{"dtype": "float32"}')  # of the run that resumed
    (model / "model.safetensors").write_bytes(b"weights" * 100)
    hugging_face_list(model)
    attempts: list[Callable[[], CheckpointDamaged | None]] = [
        lambda: damage_of(folder / "actor"),
        lambda: damage_of(model),
    ]
    for attempt in attempts:
        assert attempt() is None
        path = model / "model.safetensors"
        error = restored(path, DAMAGE[kind][0], attempt)
        assert isinstance(error, CheckpointDamaged)
        name = f"{path.name}.other" if kind == "extra" else path.name
        assert error.path.name == name


def test_a_model_that_is_being_completed_damages_no_checkpoint(checkpoint):
    model = checkpoint / "actor" / "huggingface"
    (model / COMPLETING).touch()
    (model / "model.safetensors").write_bytes(b"weights of the run that resumed")
    (model / "config.json").write_text('{"dtype": "float32"}')
    assert damage_of(checkpoint / "actor") is None
    (model / COMPLETING).unlink()
    assert damage_of(checkpoint / "actor") is not None


def test_a_resume_compares_a_folder_that_was_completed_later(checkpoint):
    model = checkpoint / "actor" / "huggingface"
    (model / "model.safetensors").write_bytes(b"weights")
    hugging_face_list(model)
    verify_whole(checkpoint)
    flip(model / "model.safetensors")
    with pytest.raises(CheckpointDamaged):
        verify_whole(checkpoint)


def test_the_weights_of_a_version_alone_are_no_checkpoint_to_continue_from(checkpoint):
    for step, kinds in ((3, ["checkpoint"]), (4, ["state_dict"])):
        folder = write_checkpoint(checkpoint.parent / f"global_step_{step}")
        (folder / VERIFIED).write_text(json.dumps({"kinds": kinds}))
    flip(checkpoint / "trainer_state.json")
    error = damage_of(checkpoint)
    assert error is not None and error.older == 3


def test_a_mark_of_other_bytes_than_text_is_damage(checkpoint):
    (checkpoint / VERIFIED).write_bytes(b'{"manifest": "\xff"}')
    error = damage_of(checkpoint)
    assert error is not None and error.path == checkpoint / VERIFIED
