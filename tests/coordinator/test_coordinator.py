"""The coordinator's four calls, against a real server (invariants of coordinator.py)."""

import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import redis

from tests.support.errors import raises, raises_from
from tests.support.waits import PATIENCE, wait_until
from trinity_events import CheckpointCoordinator
from trinity_events.checkpoints import manifest as checkpoint_manifest
from trinity_events.checkpoints.layout import MANIFEST_PARTS
from trinity_events.checkpoints.manifest import parse_manifest, sums_below, write_manifest
from trinity_events.coordinator import (
    SaveAttempt,
    SaveTimeouts,
    staged_path,
    this_process,
)
from trinity_events.coordinator.inflight import SaveWaitsForItself
from trinity_events.coordinator.save_attempt import AttemptOutOfOrder
from trinity_events.coordinator.saved_paths import SavedPaths
from trinity_events.diagnostics.waits import WaitReporter
from trinity_events.errors import (
    BufferFull,
    DeadlineExceeded,
    EventsMissing,
    PublishError,
    SaveError,
)
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_schemas import (
    SaveFailed,
    SaveFinished,
    SaveProgressed,
    SaveRequested,
    SaveStarted,
    Slot,
    StepCommitted,
    ThreadCountRegistered,
    WaitEnded,
    WaitStarted,
    decode_envelope,
)


class Log(SyncEventLog):
    """A log whose server can be away."""

    away = False

    def append_many(self, payloads):
        self._reach()
        return super().append_many(payloads)

    def renew_heartbeat(self, incarnation, lease):
        self._reach()
        super().renew_heartbeat(incarnation, lease)

    def _reach(self):
        if self.away:
            raise redis.ConnectionError("nobody is there")


@pytest.fixture
def publisher(sync_client, run_id):
    publisher = Publisher(Log(sync_client, run_id), 1, new_producer("actor", 3))
    yield publisher
    publisher.log.away = False
    publisher.close()


@pytest.fixture
def coordinate(publisher, tmp_path):
    """Makes coordinators of one publisher, with these timeouts."""
    made = []

    def make(**timeouts):
        made.append(CheckpointCoordinator(publisher, tmp_path, timeouts=SaveTimeouts(**timeouts)))
        return made[-1]

    yield make
    publisher.log.away = False
    publisher.flush(PATIENCE)
    for coordinator in made:
        coordinator.wait_all(20)  # it raises what a test has left
        assert coordinator._heartbeat.settle(PATIENCE)


@pytest.fixture
def coordinator(coordinate):
    return coordinate()


@pytest.fixture
def hasty(coordinate):
    """It gives the log hardly any time to take what is waited for, and waits for no heartbeat."""
    return coordinate(first_heartbeat=0.01, flush=0.05)


@pytest.fixture
def away(publisher):
    """The server is away."""
    publisher.log.away = True


def said(publisher):
    """The events of the log, without reports of waits that lasted."""
    return [
        event for event in published(publisher) if not isinstance(event, WaitStarted | WaitEnded)
    ]


def published(publisher):
    publisher.flush(20)
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


@pytest.mark.parametrize("folder", [False, True])
def test_a_long_save_tells_how_many_bytes_are_written(coordinate, publisher, tmp_path, folder):
    coordinator = coordinate(progress_every=0.01)
    path = tmp_path / "model"

    def progressed():
        return [event for event in said(publisher) if isinstance(event, SaveProgressed)]

    def save():
        time.sleep(0.05)  # there is nothing yet, and nothing is said
        if folder:
            path.mkdir()
        for number in range(2):
            with (path / f"shard-{number}" if folder else path).open("ab") as file:
                file.write(bytes(10))
            for _ in range(1000):
                if len(progressed()) > number:
                    break
                time.sleep(0.01)
        time.sleep(0.05)  # there is no more, and nothing is said again

    coordinator.save_sync(save, 5, path=path)
    progress_events = progressed()
    assert [event.bytes for event in progress_events] == [10, 20]
    [finished] = [event for event in said(publisher) if isinstance(event, SaveFinished)]
    assert {event.save_id for event in progress_events} == {finished.save_id}


def test_a_save_goes_on_whatever_fails_of_telling_its_progress(
    coordinate, publisher, tmp_path, monkeypatch
):
    coordinator = coordinate(progress_every=0.001)
    size_requested = threading.Event()

    def hangs(paths):
        if threading.current_thread().name != "save-progress":
            return 7
        size_requested.set()
        raise RuntimeError("a file system of its own kind")

    monkeypatch.setattr(SavedPaths, "size", hangs)
    path = tmp_path / "model"

    def save():
        path.write_bytes(b"weights")
        assert size_requested.wait(PATIENCE)

    coordinator.save_sync(save, 5, path=path)
    assert [type(event) for event in said(publisher)] == [SaveStarted, SaveFinished]


def test_the_caller_goes_on_while_a_save_runs(coordinator):
    release = threading.Event()
    coordinator.save_async("model", lambda: release.wait(PATIENCE), 1)
    release.set()  # reached only because save_async did not wait
    coordinator.wait_all()


def test_saves_of_one_name_are_serialised_and_of_two_are_not(coordinator):
    """Invariant 3."""
    running, most = {"a": 0, "b": 0}, {"a": 0, "both": 0}
    both = threading.Barrier(2)

    def save(name, meet=False):
        running[name] += 1
        most[name] = max(most.get(name, 0), running[name])
        if meet:
            both.wait(PATIENCE)
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
    """Invariant 4."""

    def save():
        raise OSError("disk full")

    coordinator.save_async("model", save, 5)
    coordinator.save_async("optimizer", save, 5)
    with raises(SaveError, __cause__=re.compile("disk full")) as caught:
        coordinator.wait_all()
    assert len(caught.value.failures) == 2
    failures = [event for event in said(publisher) if isinstance(event, SaveFailed)]
    assert {(failure.error_type, failure.message) for failure in failures} == {
        ("OSError", "disk full")
    }
    coordinator.wait_all()  # raised once


def test_a_failure_is_not_lost_when_the_name_is_used_again(coordinator):
    coordinator.save_async("model", lambda: 1 / 0, 1)
    coordinator.save_async("model", lambda: None, 2)
    with raises(SaveError, __cause__=re.compile("division by zero")):
        coordinator.wait_all()


def test_a_save_that_leaves_no_file_failed(coordinator, publisher, tmp_path):
    coordinator.save_async("model", lambda: None, 1, path=tmp_path / "nothing.pt")
    with raises(SaveError, __cause__=re.compile("No such file")):
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


def test_a_runs_folder_may_be_text(publisher, tmp_path):
    coordinator = CheckpointCoordinator(publisher, str(tmp_path))
    path = staged_path(str(tmp_path), 1, 5)
    coordinator.save_sync(partial(path.mkdir, parents=True), 5, path=path)
    assert said(publisher)[-1].path == str(path.relative_to(tmp_path))
    coordinator.wait_all()


async def test_registering_commits_with_the_registrations_again(coordinator, publisher):
    await coordinator.register_and_monitor(
        7, state_dict_thread_count=2, checkpoint_thread_count=3, metrics={"reward": 0.5}
    )
    *registered, committed = said(publisher)
    assert all(isinstance(event, ThreadCountRegistered) for event in registered)
    assert isinstance(committed, StepCommitted)
    assert committed.kind == "checkpoint"
    assert committed.registrations == tuple(event.registration for event in registered)
    assert {
        (registration.kind, registration.expected) for registration in committed.registrations
    } == {
        ("state_dict", 2),
        ("checkpoint", 3),
    }


async def test_registering_again_expects_no_more(coordinator, publisher):
    for _ in range(2):
        await coordinator.register_and_monitor(7, checkpoint_thread_count=2)
    ids = {
        registration.registration_id
        for event in said(publisher)
        for registration in registrations(event)
    }
    assert ids == {"actor-3-checkpoint"}


def registrations(event):
    return getattr(event, "registrations", None) or [event.registration]


async def test_registering_nothing_says_so_explicitly(coordinator, publisher):
    await coordinator.register_and_monitor(7, is_state_dict=True)
    [registration] = said(publisher)[-1].registrations
    assert (registration.kind, registration.expected) == ("state_dict", 0)


async def test_a_commit_is_in_the_log_when_registering_returns(coordinator, publisher):
    await coordinator.register_and_monitor(7)
    assert publisher.backlog == 0
    assert isinstance(decode_envelope(publisher.log.read()[-1].payload).event, StepCommitted)


async def test_a_commit_that_the_log_does_not_take_is_an_error(hasty, publisher, away):
    with raises(EventsMissing, count=2):
        await hasty.register_and_monitor(7)
    publisher.log.away = False
    assert isinstance(said(publisher)[-1], StepCommitted), "kept, and told when the server is back"


# --- waiting --------------------------------------------------------------------------------


def test_waiting_has_a_deadline_that_names_what_still_runs(coordinator):
    release = threading.Event()
    coordinator.save_async("model", lambda: release.wait(PATIENCE), 5)
    coordinator.save_async("optimizer", lambda: release.wait(PATIENCE), 5)
    both = re.compile("model of step 5 is running, .*optimizer of step 5")
    with raises(DeadlineExceeded, deadline=0.01, reason=both):
        coordinator.wait_all(deadline=0.01)
    release.set()
    coordinator.wait_all(deadline=PATIENCE)


def test_waits_for_saves_that_last_are_reported(publisher, tmp_path):
    publisher.waits = WaitReporter(publisher, threshold=0.05)
    coordinator, release = CheckpointCoordinator(publisher, tmp_path), threading.Event()

    def reported(what):
        waits = [event for event in published(publisher) if isinstance(event, WaitStarted)]
        return [wait for wait in waits if wait.what == what]

    def release_once_reported(what):
        try:
            wait_until(partial(reported, what), "the wait was not reported")
        finally:
            release.set()

    with ThreadPoolExecutor(1) as beside:
        coordinator.save_async("model", lambda: release.wait(PATIENCE), 5)
        seen = beside.submit(release_once_reported, "the end of model of step 5")
        coordinator.save_async("model", lambda: None, 6)
        seen.result()
        coordinator.wait_all()
        release.clear()
        coordinator.save_async("optimizer", lambda: release.wait(PATIENCE), 6)
        seen = beside.submit(release_once_reported, "the end of optimizer of step 6")
        coordinator.wait_all()
        seen.result()
    events = published(publisher)
    wait_ids = {event.wait_id for event in events if isinstance(event, WaitStarted)}
    ended = [event for event in events if isinstance(event, WaitEnded)]
    assert {event.waits_for for event in events if isinstance(event, WaitStarted)} == {("actor-3",)}
    assert {event.wait_id for event in ended} == wait_ids
    assert {event.outcome for event in ended} == {"over"}


def test_a_save_that_would_wait_for_itself_is_refused(coordinator):
    def again():
        coordinator.save_async("model", lambda: None, 6)

    coordinator.save_async("model", again, 5)
    action = "save model of step 6"
    with raises_from(SaveWaitsForItself, save="model of step 5", action=action):
        coordinator.wait_all()
    with raises(SaveWaitsForItself, action="wait for all saves"):
        coordinator.save_sync(coordinator.wait_all, 5)


def test_a_save_at_once_waits_for_one_of_its_name_in_the_background(coordinator):
    release, order = threading.Event(), []

    def slow():
        release.wait(PATIENCE)
        order.append("background")

    coordinator.save_async("model", slow, 1)
    threading.Timer(0.02, release.set).start()
    coordinator.save_sync(lambda: order.append("at once"), 2, name="model")
    assert order == ["background", "at once"]


# --- a server that is away ------------------------------------------------------------------


def test_a_server_that_is_away_holds_no_save_up_and_hears_of_it_later(hasty, publisher, away):
    """Invariant 1."""
    ran = []
    hasty.save_sync(lambda: ran.append("at once"), 1)
    hasty.save_async("model", lambda: ran.append("background"), 1)
    with raises(EventsMissing, count=4):
        hasty.wait_all()
    assert sorted(ran) == ["at once", "background"]
    publisher.log.away = False
    publisher.flush(PATIENCE)
    hasty.wait_all()
    assert sorted(type(event).__name__ for event in said(publisher)) == [
        *(["SaveFinished"] * 2),
        *(["SaveStarted"] * 2),
    ]


@pytest.fixture
def full(publisher, away):
    """The publisher holds as much as it may."""
    publisher._outbox._capacity = 1
    publisher.publish(StepCommitted(step=0, kind="checkpoint"))
    with pytest.raises(BufferFull):
        publisher.publish(StepCommitted(step=0, kind="checkpoint"))


def test_a_save_that_the_full_buffer_cannot_tell_of_is_made_and_its_caller_told(
    hasty, publisher, full
):
    """Invariant 1."""
    ran = []
    with raises(PublishError, what=re.compile("save_sync of step 1 was saved")):
        hasty.save_sync(lambda: ran.append("at once"), 1)
    hasty.save_async("model", lambda: ran.append("background"), 1)
    with raises(PublishError, what=re.compile("model of step 1 was saved")):
        hasty.wait_all()
    assert ran == ["at once", "background"]
    publisher.log.away = False
    publisher.flush(PATIENCE)
    hasty.wait_all()  # raised once
    assert [type(event) for event in said(publisher)] == [StepCommitted]


def test_a_failed_save_is_raised_before_what_could_not_be_told(hasty, full):
    hasty.save_async("model", lambda: 1 / 0, 1)
    hasty.save_async("optimizer", lambda: None, 1)
    with raises(SaveError) as caught:
        hasty.wait_all()
    first, *others = caught.value.failures
    assert isinstance(first, ZeroDivisionError)
    assert others and all(isinstance(failure, PublishError) for failure in others)


def test_a_save_whose_start_alone_could_not_be_told_counts_without_it(hasty, publisher, full):
    def room():
        publisher.log.away = False
        publisher.flush(20)

    hasty.save_sync(room, 1)
    assert isinstance(said(publisher)[-1], SaveFinished)


# --- one attempt ----------------------------------------------------------------------------

SLOT = Slot(step=5, kind="checkpoint", role="actor", rank=0, name="model")


def test_an_attempt_that_asks_for_its_turn_starts_when_it_is_granted():
    attempt = SaveAttempt("a", SLOT, path="x", lease=15.0, process=this_process())
    requested = attempt.begin()
    assert isinstance(requested, SaveRequested)
    assert (requested.process.pid, requested.lease) == (os.getpid(), 15.0)
    assert isinstance(started := attempt.granted(), SaveStarted)
    assert (started.path, started.lease) == ("x", 15.0)
    finished = attempt.finish(nbytes=3, seconds=1.0)
    assert (finished.save_id, finished.path, attempt.stage) == ("a", "x", "over")


def test_an_attempt_that_asks_nobody_starts_at_once():
    attempt = SaveAttempt("a", SLOT)
    assert isinstance(attempt.begin(), SaveStarted)
    assert isinstance(attempt.fail(OSError("disk full")), SaveFailed)


def test_an_attempt_may_fail_while_it_waits_for_its_turn():
    attempt = SaveAttempt("a", SLOT, process=this_process())
    attempt.begin()
    assert attempt.fail(TimeoutError("too long")).error_type == "TimeoutError"


def test_an_attempt_takes_no_step_twice_and_none_out_of_order():
    attempt = SaveAttempt("a", SLOT)
    with raises(AttemptOutOfOrder, save="model of step 5", stage="new", stages=("running",)):
        attempt.finish(nbytes=0, seconds=0)
    attempt.begin()
    with raises(AttemptOutOfOrder, stage="running", stages=("new",)):
        attempt.begin()
    attempt.fail(OSError())
    with raises(AttemptOutOfOrder, stage="over", stages=("running",)):
        attempt.finish(nbytes=0, seconds=0)


def test_a_failure_is_told_whatever_its_message_is_made_of(coordinator, publisher):
    def save():
        raise OSError(f"no such file: {os.fsdecode(b'/x/' + bytes([255]))} {'x' * 9000}")

    with pytest.raises(OSError, match="no such file"):
        coordinator.save_sync(save, 5)
    assert said(publisher)[-1].message.startswith("no such file: /x/\\udcff xxx")


@pytest.mark.processes
def test_a_process_is_known_by_its_host_its_number_and_its_start():
    assert this_process() == this_process()
    command = "from trinity_events.coordinator import this_process as it; print(it().started)"
    shown = subprocess.run([sys.executable, "-c", command], capture_output=True, check=True)
    assert int(shown.stdout) > this_process().started


def test_a_save_does_not_wait_for_ever_for_the_one_of_its_name_before(publisher, tmp_path):
    coordinator, release = CheckpointCoordinator(publisher, turn_deadline=0.1), threading.Event()
    coordinator.save_async("model", lambda: release.wait(PATIENCE), 1)
    with raises(
        DeadlineExceeded,
        missing=re.compile("model of step 2"),
        reason=re.compile("model of step 1"),
    ):
        coordinator.save_async("model", lambda: None, 2)
    release.set()
    coordinator.wait_all(20)


def listed(path):
    [part] = (path / MANIFEST_PARTS).iterdir()
    return parse_manifest(part.read_bytes())


def test_a_save_lists_all_of_its_files_before_it_is_published_as_finished(
    coordinator, publisher, tmp_path
):
    """Invariant 5."""
    staged = staged_path(tmp_path, 1, 5)
    model, config = staged / "actor" / "model.pt", staged / "actor" / "huggingface"

    def save():
        config.mkdir(parents=True)
        model.write_bytes(b"weights")
        (config / "config.json").write_bytes(b"{}")

    coordinator.save_async("model", save, 5, path=model, also=[config])
    coordinator.wait_all(PATIENCE)
    [_, finished] = said(publisher)
    sums = listed(staged)
    assert {name: file.bytes for name, file in sums.items()} == {
        "actor/model.pt": 7,
        "actor/huggingface/config.json": 2,
    }
    assert finished.digest == f"sha256:{sums['actor/model.pt'].sha256}"
    assert (finished.path, finished.bytes) == (str(model.relative_to(tmp_path)), 7)


def test_a_folder_that_ranks_digested_together_is_not_read_again(
    coordinator, tmp_path, monkeypatch
):
    folder = staged_path(tmp_path, 1, 5) / "actor" / "model"

    def save():
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(b"weights")
        write_manifest(folder, sums_below([folder], folder))
        monkeypatch.setattr(checkpoint_manifest, "digest_files", lambda paths, **_: [*paths])

    coordinator.save_sync(save, 5, path=folder)
    assert listed(folder.parent.parent).keys() == {"actor/model/__0_0.distcp"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_that_several_ranks_write_is_left_to_the_reducer(coordinator, tmp_path, ranks):
    staged = staged_path(tmp_path, 1, 5)
    staged.mkdir(parents=True)
    coordinator.save_sync(lambda: (staged / "a").write_bytes(b"a"), 5, path=staged, ranks=ranks)
    [part] = (staged / MANIFEST_PARTS).iterdir()
    assert (parse_manifest(part.read_bytes()).keys() == {"a"}) == (ranks == 1)
