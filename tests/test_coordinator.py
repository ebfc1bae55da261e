"""The coordinator's four calls, against a real server."""

import threading
import time

import pytest

from trinity_events import CheckpointCoordinator
from trinity_events.coordinator import staged_path
from trinity_events.errors import SaveError
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_schemas import (
    SaveFailed,
    SaveFinished,
    SaveStarted,
    StepCommitted,
    ThreadCountRegistered,
    decode_envelope,
)


@pytest.fixture
def publisher(sync_client, run_id):
    return Publisher(SyncEventLog(sync_client, run_id), 1, new_producer("actor", 3))


@pytest.fixture
def coordinator(publisher, tmp_path):
    return CheckpointCoordinator(publisher, tmp_path)


def said(publisher):
    return [decode_envelope(entry.payload).event for entry in publisher.log.read()]


def test_a_background_save_is_told_as_it_starts_and_as_it_is_durable(
    coordinator, publisher, tmp_path
):
    path = staged_path(tmp_path, 1, 5) / "actor" / "model.pt"

    def save():
        path.parent.mkdir(parents=True)
        path.write_bytes(b"weights")

    coordinator.save_async("model", save, 5, is_state_dict=True, path=path)
    coordinator.wait_all()
    started, finished = said(publisher)
    assert isinstance(started, SaveStarted)
    assert isinstance(finished, SaveFinished)
    assert started.save_id == finished.save_id
    assert (finished.slot.kind, finished.slot.rank, finished.slot.name) == (
        "state_dict",
        3,
        "model",
    )
    assert finished.path == str(path.relative_to(tmp_path))
    assert finished.bytes == 7
    assert finished.digest.startswith("sha256:")


def test_the_caller_goes_on_while_a_save_runs(coordinator):
    release = threading.Event()
    coordinator.save_async("model", lambda: release.wait(10), 1)
    release.set()  # reached only because save_async did not wait
    coordinator.wait_all()


def test_saves_of_one_name_are_serialised_and_of_two_are_not(coordinator):
    running, most = {"a": 0, "b": 0}, {"a": 0, "both": 0}
    both = threading.Barrier(2)

    def save(name, meet=False):
        running[name] += 1
        most[name] = max(most.get(name, 0), running[name])
        if meet:
            both.wait(10)
        time.sleep(0.01)
        running[name] -= 1

    for step in range(5):
        coordinator.save_async("a", lambda: save("a"), step)
    assert most["a"] == 1
    coordinator.wait_all()
    coordinator.save_async("a", lambda: save("a", meet=True), 6)
    coordinator.save_async("b", lambda: save("b", meet=True), 6)
    coordinator.wait_all()  # the barrier was met: both ran at once


def test_a_failed_background_save_is_an_event_and_wait_all_raises_it(coordinator, publisher):
    def save():
        raise OSError("disk full")

    coordinator.save_async("model", save, 5)
    coordinator.save_async("optimizer", save, 5)
    with pytest.raises(
        SaveError, match=r"of step 5 failed \(and 1 more\): OSError: disk full"
    ) as caught:
        coordinator.wait_all()
    assert len(caught.value.failures) == 2
    failures = [event for event in said(publisher) if isinstance(event, SaveFailed)]
    assert {(one.error_type, one.message) for one in failures} == {("OSError", "disk full")}
    coordinator.wait_all()  # raised once


def test_a_failure_is_not_lost_when_the_name_is_used_again(coordinator):
    coordinator.save_async("model", lambda: 1 / 0, 1)
    coordinator.save_async("model", lambda: None, 2)
    with pytest.raises(SaveError, match="ZeroDivisionError"):
        coordinator.wait_all()


def test_a_save_that_leaves_no_file_failed(coordinator, publisher, tmp_path):
    coordinator.save_async("model", lambda: None, 1, path=tmp_path / "nothing.pt")
    with pytest.raises(SaveError, match="FileNotFoundError"):
        coordinator.wait_all()
    assert isinstance(said(publisher)[-1], SaveFailed)


def test_save_sync_runs_here_and_raises_what_it_raises(coordinator, publisher):
    threads = []
    coordinator.save_sync(lambda: threads.append(threading.current_thread()), 5)
    assert threads == [threading.current_thread()]
    with pytest.raises(ZeroDivisionError):
        coordinator.save_sync(lambda: 1 / 0, 6)
    kinds = [type(event) for event in said(publisher)]
    assert kinds == [SaveStarted, SaveFinished, SaveStarted, SaveFailed]


def test_a_path_outside_the_run_is_not_told(coordinator, publisher, tmp_path_factory):
    path = tmp_path_factory.mktemp("elsewhere") / "model.pt"
    coordinator.save_async("model", path.touch, 1, path=path)
    coordinator.wait_all()
    assert said(publisher)[-1].path is None


async def test_registering_commits_with_the_registrations_again(coordinator, publisher):
    await coordinator.register_and_monitor(
        7, state_dict_thread_count=2, checkpoint_thread_count=3, metrics={"reward": 0.5}
    )
    *registered, committed = said(publisher)
    assert all(isinstance(one, ThreadCountRegistered) for one in registered)
    assert isinstance(committed, StepCommitted)
    assert committed.kind == "checkpoint"
    assert committed.registrations == tuple(one.registration for one in registered)
    assert {(one.kind, one.expected) for one in committed.registrations} == {
        ("state_dict", 2),
        ("checkpoint", 3),
    }


async def test_registering_again_expects_no_more(coordinator, publisher):
    for _ in range(2):
        await coordinator.register_and_monitor(7, checkpoint_thread_count=2)
    ids = {one.registration_id for event in said(publisher) for one in registrations(event)}
    assert ids == {"actor-3-checkpoint"}


def registrations(event):
    return getattr(event, "registrations", None) or [event.registration]


async def test_registering_nothing_says_so_explicitly(coordinator, publisher):
    await coordinator.register_and_monitor(7, is_state_dict=True)
    [registration] = said(publisher)[-1].registrations
    assert (registration.kind, registration.expected) == ("state_dict", 0)
