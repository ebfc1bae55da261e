"""Disks that are full or cannot be written: one sentence, and nothing else lost."""

import subprocess

import pytest

from tests.histories import History, committed, finished, registration
from trinity_events import CheckpointCoordinator
from trinity_events.core import plan_files
from trinity_events.errors import SaveError
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_events.reducer import CheckpointFiles
from trinity_schemas import SaveFailed, decode_envelope


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB of its own."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted without privileges")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    with pytest.raises(OSError, match="No space left"):
        (folder / "filler").write_bytes(b"x" * 1_000_000)


def test_a_save_on_a_full_disk_is_a_failed_save_and_one_sentence(sync_client, run_id, small_disk):
    publisher = Publisher(SyncEventLog(sync_client, run_id), 1, new_producer("actor"))
    coordinator = CheckpointCoordinator(publisher, small_disk)
    path = small_disk / "model.pt"
    coordinator.save_async("model", lambda: path.write_bytes(b"x" * 200_000), 5, path=path)
    with pytest.raises(SaveError, match=r"model of step 5 failed: OSError: .*No space left") as e:
        coordinator.wait_all()
    assert "save the step again" in str(e.value)
    failed = decode_envelope(publisher.log.read()[-1].payload).event
    assert isinstance(failed, SaveFailed)
    assert "No space left on device" in failed.message


def test_pointers_wait_for_room_and_are_then_right(small_disk, caplog):
    files = CheckpointFiles(small_disk, "run")
    history = History()
    history.add(committed(7, "state_dict", registration()))
    history.add(finished(7))
    (small_disk / "run").mkdir()
    plan = plan_files(history.fold()[0].state)
    fill(small_disk)
    files.reconcile(plan)
    path = small_disk / "run" / "latest_state_dict_iteration.txt"
    assert not path.exists() or path.read_text() == "7", "never half a number"
    assert "No space left on device" in caplog.text or path.exists()
    (small_disk / "filler").unlink()
    files.reconcile(plan)
    assert path.read_text() == "7"
