"""Checkpoint files against the digests in the log: a real coordinator, reducer and folder."""

import hashlib
import json
import shutil
from functools import partial

import pytest
from msgspec import structs

from tests.support.damage import flip
from tests.support.event_histories import History, finished
from tests.support.pipeline import folded, reducer_task
from tests.support.waits import until
from trinity_events import CheckpointCoordinator
from trinity_events.archive import Archive, record_run
from trinity_events.archive.checkpoint_digests import CheckedFiles, SavedFiles
from trinity_events.checkpoints.layout import FILE_DIGESTS
from trinity_events.checkpoints.manifest import sums_below, write_manifest
from trinity_events.coordinator import staged_path
from trinity_events.coordinator.saved_paths import SavedPaths
from trinity_events.log import Publisher, SyncEventLog, new_producer

FILE, FOLDER = "actor/model.pt", "actor/optimizer"


@pytest.fixture
async def run_folder(publisher, sync_client, log, redis_url, run_id, tmp_path):
    """The folder of a run whose checkpoint has a file and a folder."""
    own = Publisher(SyncEventLog(sync_client, run_id), publisher.epoch, new_producer("actor"))
    coordinator = CheckpointCoordinator(own, tmp_path / run_id)
    staged = staged_path(tmp_path / run_id, publisher.epoch, 2)

    def write(relative):
        path = staged / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"weights" * 100)

    for name, path, written in (
        ("model", FILE, FILE),
        ("optimizer", FOLDER, f"{FOLDER}/shard_0.pt"),
    ):
        coordinator.save_async(name, partial(write, written), 2, path=staged / path)
    coordinator.wait_all(60)
    async with reducer_task(redis_url, run_id, tmp_path):
        await coordinator.register_and_monitor(2, checkpoint_thread_count=2)
        await folded(log)
        await until((tmp_path / run_id / "global_step_2").is_dir)
    own.close()
    return tmp_path / run_id


@pytest.fixture
def verified(cli, run_folder, redis_url):
    def verify(*what):
        root = ("--checkpoint-root", str(run_folder.parent))
        shown = cli(
            "verify", *(what or (run_folder.name,)), "--files", "--json", "--redis-url",
            redis_url, *root
        )  # fmt: skip
        report = json.loads(shown.stdout)
        mismatches = [
            finding["what"] for finding in report["findings"] if finding["severity"] == "mismatch"
        ]
        assert shown.returncode == (1 if mismatches else 0)
        return report["checked"], mismatches

    return verify


def test_files_that_are_as_they_were_saved_are_counted(verified):
    checked, mismatches = verified()
    assert mismatches == []
    assert checked[-1].startswith("1 files by digest and 1 saves by size (0 saves are of folders")


def test_a_changed_byte_of_a_checkpoint_is_found(verified, run_folder):
    path = run_folder / "global_step_2" / FILE
    data = bytearray(path.read_bytes())
    data[50] ^= 1
    path.write_bytes(data)
    [mismatch] = verified()[1]
    assert mismatch.startswith(f"{path} of step 2 was changed: its digest is sha256:")


def test_a_lost_a_shorter_and_an_unreadable_file_are_found(verified, run_folder):
    final = run_folder / "global_step_2"
    (final / FILE).unlink()
    with (final / FOLDER / "shard_0.pt").open("ab") as shard:
        shard.write(b"more")
    lost, longer = sorted(verified()[1])
    assert lost.endswith("model.pt of step 2 is not there, but its folder is")
    assert longer.endswith("optimizer of step 2 has 704 bytes, and 700 were saved")
    (final / FILE).symlink_to("/etc/passwd")
    assert "cannot be read" in sorted(verified()[1])[0], "a link is not followed"


def test_a_checkpoint_that_was_deleted_is_no_mismatch_of_its_files(verified, run_folder):
    (run_folder / "global_step_2").rename(run_folder / "elsewhere")
    checked, mismatches = verified()
    assert "(2 saves are of folders that are deleted)" in checked[-1]
    assert len(mismatches) == 1, "the iteration file names a folder that is not there"


async def test_the_log_may_be_in_a_file(verified, run_folder, log, cli, tmp_path):
    path = tmp_path / "run.jsonl"
    await record_run(log, path, Archive(run_folder, log.run_id))
    assert verified(str(path))[1] == []
    shutil.rmtree(run_folder)
    shown = cli("verify", str(path), "--files", "--checkpoint-root", str(tmp_path))
    assert shown.returncode == 1
    assert shown.stderr.startswith(f"error: {run_folder} is not there: name the folder")


def test_a_folder_with_a_list_of_digests_is_checked_by_that_list(tmp_path):
    model = tmp_path / "actor" / "huggingface"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights" * 100)
    (model / FILE_DIGESTS).write_text("0123  model.safetensors\n")
    nbytes, digest, _ = SavedPaths(model).measure()
    history = History()
    saved = structs.replace(
        finished(2), path="actor/huggingface", bytes=nbytes, digest=digest, seconds=1.0
    )
    history.add(saved)
    files = SavedFiles()
    for _, envelope in history.entries:
        files.add(envelope)
    assert files.check(tmp_path) == CheckedFiles(digests=1, sizes=0, gone=0, mismatches=[])
    (model / FILE_DIGESTS).write_text("3210  model.safetensors\n")
    [mismatch] = files.check(tmp_path).mismatches
    assert "was changed: its digest is sha256:" in mismatch


def test_a_changed_file_is_reported_once_by_the_log_or_by_the_manifest(tmp_path):
    """The log has no digest of a folder that Megatron's ranks wrote together."""
    folder = tmp_path / "global_step_2"
    for name in ("actor/model.pt", "training/__0_0.distcp"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(b"weights")
    write_manifest(folder, sums_below([folder], folder))
    digest = f"sha256:{hashlib.sha256(b'weights').hexdigest()}"
    history, files = History(), SavedFiles()
    saves = (("global_step_2/actor/model.pt", digest), ("global_step_2/training", None))
    for path, saved_digest in saves:
        history.add(structs.replace(finished(2), path=path, bytes=7, digest=saved_digest))
    for _, envelope in history.entries:
        files.add(envelope)
    assert files.check(tmp_path) == CheckedFiles(1, 1, 0, [], manifests=1)
    for name in ("actor/model.pt", "training/__0_0.distcp"):
        flip(folder / name)
        [mismatch] = files.check(tmp_path).mismatches
        assert mismatch.startswith(f"{folder / name} of step 2 was changed: ")
        flip(folder / name)
