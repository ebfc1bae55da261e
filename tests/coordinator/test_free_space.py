"""A save that does not fit on its disk fails before it writes (invariants of free_space.py)."""

from __future__ import annotations

import threading
from collections import namedtuple
from functools import partial

import pytest

from tests.support.errors import raises
from tests.support.waits import PATIENCE
from trinity_events import CheckpointCoordinator
from trinity_events.checkpoints.layout import final_name
from trinity_events.coordinator import DiskTooFull, PlannedSave, staged_path
from trinity_events.errors import SaveError
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_events.system import disk_space
from trinity_schemas import SaveFailed, SaveFinished, decode_envelope

Usage = namedtuple("Usage", ("total", "used", "free"))


@pytest.fixture
def publisher(sync_client, run_id):
    publisher = Publisher(SyncEventLog(sync_client, run_id), 1, new_producer("actor", 0))
    yield publisher
    publisher.close()


@pytest.fixture
def coordinator(publisher, tmp_path):
    return CheckpointCoordinator(publisher, tmp_path)


@pytest.fixture
def free(monkeypatch):
    """Sets the free bytes of every disk."""

    def set_free(nbytes):
        monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: Usage(1, 1, nbytes))

    return set_free


def write(path, nbytes=100):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * nbytes)


def save(coordinator, path, step, nbytes=100, **settings):
    plan = settings.pop("plan", PlannedSave(save=partial(write, path, nbytes)))
    coordinator.save_async("model", plan, step, path=path, **settings)


def get_events(publisher, kind):
    publisher.flush(PATIENCE)
    events = [decode_envelope(entry.payload).event for entry in publisher.log.read()]
    return [event for event in events if isinstance(event, kind)]


def test_a_save_as_large_as_the_last_one_of_its_name_fails_without_writing_and_the_next_fits(
    coordinator, publisher, tmp_path, free
):
    paths = [staged_path(tmp_path, 1, step) / "model.pt" for step in (5, 6, 7)]
    free(0)
    save(coordinator, paths[0], 5)  # nothing says how large it is
    coordinator.wait_all(PATIENCE)
    free(99)
    save(coordinator, paths[1], 6)
    with raises(SaveError, save="model of step 6") as failed:
        coordinator.wait_all(PATIENCE)
    [error] = failed.value.failures
    assert isinstance(error, DiskTooFull)
    assert (error.folder, error.needed, error.free) == (paths[1], 100, 99)
    assert not paths[1].parent.exists()
    [event] = get_events(publisher, SaveFailed)
    assert (event.error_type, event.message) == ("DiskTooFull", str(error))
    free(100)
    save(coordinator, paths[2], 7)
    coordinator.wait_all(PATIENCE)
    assert len(get_events(publisher, SaveFinished)) == 2


def test_a_save_of_a_new_process_is_as_large_as_the_same_files_of_the_newest_checkpoint(
    coordinator, tmp_path, free
):
    for step, nbytes in ((9, 300), (10, 200)):
        write(tmp_path / final_name(step) / "actor" / "model.pt", nbytes)
    free(199)
    path = staged_path(tmp_path, 1, 11) / "actor" / "model.pt"
    with raises(DiskTooFull, needed=200, free=199, folder=path):
        coordinator.save_sync(partial(write, path), 11, name="model", path=path)
    other = path.with_name("other.pt")  # of which no checkpoint has one
    coordinator.save_sync(partial(write, other), 11, name="other", path=other)
    coordinator.wait_all(PATIENCE)


def test_a_function_that_knows_its_bytes_is_canceled_and_never_called(coordinator, tmp_path, free):
    free(99)
    calls = []
    plan = PlannedSave(
        save=lambda: calls.append("save"), nbytes=100, cancel=lambda: calls.append("cancel")
    )
    save(coordinator, tmp_path / "model.pt", 5, plan=plan)
    with raises(SaveError):
        coordinator.wait_all(PATIENCE)
    with raises(DiskTooFull, needed=100, free=99):
        coordinator.start_save("model", plan, 5, path=tmp_path / "model.pt")
    assert calls == ["cancel", "cancel"]


@pytest.mark.parametrize(("free_bytes", "fits"), [(299, False), (300, True)])
def test_the_parts_of_all_ranks_count_less_what_is_written_already(
    coordinator, tmp_path, free, free_bytes, fits
):
    folder = staged_path(tmp_path, 1, 5)
    write(folder / "rank_1.pt")  # a peer was faster
    free(free_bytes)
    path = folder / "rank_0.pt"
    plan = PlannedSave(save=partial(write, path), nbytes=100)
    save(coordinator, path, 5, plan=plan, ranks=4)
    if fits:
        coordinator.wait_all(PATIENCE)
        return
    with raises(SaveError) as failed:
        coordinator.wait_all(PATIENCE)
    assert failed.value.failures[0].needed == 300


@pytest.mark.parametrize("same_step", [True, False])
def test_saves_under_way_are_added_up_less_what_they_have_written(
    coordinator, tmp_path, free, same_step
):
    """Invariant 4."""
    free(300)
    half, ended = threading.Event(), threading.Event()
    first = staged_path(tmp_path, 1, 5)
    second = first if same_step else staged_path(tmp_path, 1, 6)

    def write_in_parts():
        write(first / "a.pt", 60)
        half.set()
        assert ended.wait(PATIENCE)
        write(first / "a.pt", 200)

    slow = PlannedSave(save=write_in_parts, nbytes=200)
    coordinator.save_async("a", slow, 5, path=first / "a.pt")
    assert half.wait(PATIENCE)
    fast = PlannedSave(save=partial(write, second / "b.pt"), nbytes=100)
    try:
        free(239)  # 100 for this one, and 140 for the rest of the other one
        with raises(DiskTooFull, needed=100, others=140, free=239):
            coordinator.save_sync(fast, 6, name="b", path=second / "b.pt")
        free(240)
        coordinator.save_sync(fast, 6, name="b", path=second / "b.pt")
    finally:
        ended.set()
    coordinator.wait_all(PATIENCE)
    free(100)  # nothing is under way any more, nor counted twice
    coordinator.save_sync(fast, 7, name="b", path=second / "b.pt")


def test_a_save_that_failed_needs_no_space_any_more(coordinator, tmp_path, free):
    free(150)
    folder = staged_path(tmp_path, 1, 5)

    def fail():
        raise OSError("the disk is broken")

    with pytest.raises(OSError, match="broken"):
        coordinator.save_sync(PlannedSave(save=fail, nbytes=100), 5, name="a", path=folder / "a.pt")
    save(coordinator, folder / "b.pt", 5)
    coordinator.wait_all(PATIENCE)


def test_a_folder_that_several_ranks_write_counts_once(coordinator, tmp_path, free):
    def write_all(folder):
        for rank in range(4):
            write(folder / f"rank_{rank}.pt")

    free(400)
    for step in (5, 6):
        folder = staged_path(tmp_path, 1, step) / "shards"
        plan = PlannedSave(save=partial(write_all, folder))
        save(coordinator, folder, step, plan=plan, ranks=4)
        coordinator.wait_all(PATIENCE)
    free(399)
    with raises(DiskTooFull, needed=400):
        folder = staged_path(tmp_path, 1, 7) / "shards"
        coordinator.save_sync(partial(write_all, folder), 7, name="model", path=folder, ranks=4)


def test_a_disk_that_does_not_say_how_full_it_is_refuses_nothing(
    coordinator, tmp_path, monkeypatch
):
    def fail(_):
        raise PermissionError("no")

    monkeypatch.setattr(disk_space.shutil, "disk_usage", fail)
    path = tmp_path / "model.pt"
    save(coordinator, path, 5, plan=PlannedSave(save=partial(write, path), nbytes=100))
    coordinator.wait_all(PATIENCE)
    assert path.stat().st_size == 100
