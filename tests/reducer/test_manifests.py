"""The reducer joins what the savers listed, before a folder gets its final name."""

import hashlib
import json
import re

import pytest

from tests.support.checkpoint_runs import Run, staged
from tests.support.errors import raises
from trinity_events.checkpoints.layout import MANIFEST, MANIFEST_PARTS, VERIFIED
from trinity_events.checkpoints.manifest import parse_manifest, sums_below, write_part
from trinity_events.checkpoints.verification import CheckpointDamaged, verify_files
from trinity_events.reducer.checkpoint_evidence import NotVerified, join_manifest
from trinity_events.system.open_folder import OpenFolder

MODEL, OPTIMIZER = "actor/model.pt", "actor/optim.pt"


def save(folder, name, data, slot="model"):
    """Write a file, and list it as the saver of a slot does."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    write_part(folder, slot, sums_below([path], folder))


def join(folder):
    with OpenFolder.at(folder) as opened:
        return join_manifest(5, opened)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "global_step_5"
    save(folder, MODEL, b"weights")
    save(folder, OPTIMIZER, b"moments", "optimizer")
    return folder


def test_the_lists_of_all_saves_become_one_manifest_whose_digest_is_in_the_mark(tmp_path):
    run = Run(tmp_path)
    save(run.folder / staged(3), MODEL, b"weights")
    save(run.folder / staged(3), OPTIMIZER, b"moments", "optimizer")
    _promote(run, 3)
    final = run.folder / "global_step_3"
    data = (final / MANIFEST).read_bytes()
    assert parse_manifest(data).keys() == {MODEL, OPTIMIZER, "model.pt"}
    assert not (final / MANIFEST_PARTS).exists()
    mark = json.loads((final / VERIFIED).read_text())
    assert mark["manifest"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert verify_files(final)
    (final / MANIFEST).write_bytes(data.replace(b"weights", b"WEIGHTS") + b"#")
    with pytest.raises(CheckpointDamaged) as raised:
        verify_files(final)
    assert raised.value.path == final / MANIFEST


def _promote(run, step):
    """Let a save of the step finish in a folder that is there already."""
    mkdir = type(run.folder).mkdir
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run.folder), "mkdir", lambda self, **_: mkdir(self, exist_ok=True))
        run.save(step)


def test_a_folder_whose_savers_listed_nothing_has_no_manifest(tmp_path):
    run = Run(tmp_path)
    run.save(1)
    assert not (run.folder / "global_step_1" / MANIFEST).exists()
    assert not verify_files(run.folder / "global_step_1")


def test_a_file_that_no_save_listed_is_digested_by_the_reducer(folder):
    (folder / "notes.txt").write_text("of a training loop")
    join(folder)
    assert "notes.txt" in parse_manifest((folder / MANIFEST).read_bytes())
    assert verify_files(folder)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.unlink(), "is not there"),
        (lambda path: path.write_bytes(b"weight"), "has 6 bytes, and 7 were saved"),
        (lambda path: path.write_bytes(b"weights and more"), "has 16 bytes, and 7 were saved"),
    ],
    ids=["gone", "cut", "longer"],
)
def test_a_folder_is_not_given_its_name_if_a_file_is_not_as_it_was_listed(folder, damage, reason):
    damage(folder / MODEL)
    with pytest.raises(NotVerified) as raised:
        join(folder)
    assert (raised.value.step, raised.value.folder) == (5, folder / MODEL)
    assert raised.value.reason.startswith(reason)
    assert not (folder / MANIFEST).exists()


def test_of_two_saves_of_one_file_that_counts_which_wrote_what_is_there(folder):
    save(folder, MODEL, b"later weights", "again")
    join(folder)
    assert verify_files(folder)


def test_what_none_of_two_saves_of_a_file_wrote_is_refused(folder):
    save(folder, MODEL, b"later weights", "again")
    (folder / MODEL).write_bytes(b"WEIGHTS")
    with raises(NotVerified, folder=re.compile(f"{MODEL}$"), reason=re.compile("any of its saves")):
        join(folder)


def test_a_later_attempt_at_a_save_replaces_its_list(folder):
    save(folder, MODEL, b"second attempt")
    join(folder)
    assert parse_manifest((folder / MANIFEST).read_bytes())[MODEL].bytes == len(b"second attempt")


def test_joining_again_after_a_crash_has_the_same_result(folder):
    save(folder, MODEL, b"weights")
    first = join(folder)
    assert join(folder) == first
    save(folder, "critic/model.pt", b"values", "critic")
    assert join(folder) != first
    assert verify_files(folder)


def test_a_list_that_was_changed_is_refused_with_its_path(folder):
    [part, *_] = (folder / MANIFEST_PARTS).iterdir()
    part.write_bytes(part.read_bytes().replace(b"bytes", b"BYTES"))
    with pytest.raises(NotVerified) as raised:
        join(folder)
    assert raised.value.folder == part


def test_a_folder_that_several_ranks_wrote_is_digested_by_the_reducer(tmp_path):
    (tmp_path / "shared.distcp").write_bytes(b"of all ranks")
    for rank in range(2):  # a save of several ranks lists nothing, as the others still write
        write_part(tmp_path, f"model {rank}", {})
    assert join(tmp_path) is not None
    assert parse_manifest((tmp_path / MANIFEST).read_bytes()).keys() == {"shared.distcp"}
