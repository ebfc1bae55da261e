"""The heartbeat of a process that saves, and its end (invariants of heartbeat.py)."""

import threading

import pytest
import redis

from tests.support.waits import PATIENCE
from trinity_events.coordinator import CheckpointCoordinator, Heartbeat, SaveTimeouts
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_schemas import SaveFinished, SaveStarted, decode_envelope, heartbeat_key

LEASE = 0.06


class Log:
    """A log that notes beats and rests, and fails or holds them as it is told."""

    run_id = "run"

    def __init__(self):
        self.calls = []
        self.leases = []
        self.faults = 0
        self.gate = threading.Event()
        self.gate.set()
        self.changed = threading.Condition()

    def renew_heartbeat(self, incarnation, lease):
        with self.changed:
            self.calls.append("beat")
            self.leases.append(lease)
            self.changed.notify_all()
            if self.faults:
                self.faults -= 1
                raise redis.ConnectionError("refused")

    def clear_heartbeat(self, incarnation):
        self._note("resting")
        assert self.gate.wait(PATIENCE)
        self._note("rest")

    def _note(self, what):
        with self.changed:
            self.calls.append(what)
            self.changed.notify_all()

    def until(self, condition):
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self.calls), PATIENCE), self.calls


class Teller:
    """What a heartbeat needs of a publisher."""

    def __init__(self):
        self.log = Log()
        self.producer = new_producer("actor")
        self.backlog = 0


@pytest.fixture
def teller():
    return Teller()


@pytest.fixture
def heart(teller):
    heart = Heartbeat.of(teller)
    yield heart
    teller.backlog = 0
    teller.log.gate.set()
    assert heart.settle(PATIENCE)


def test_the_first_beat_is_heard_before_anything_is_said(heart, teller):
    """Invariant 1."""
    with heart.active(teller, LEASE, PATIENCE):
        assert teller.log.calls[0] == "beat"


def test_it_beats_for_as_long_as_an_attempt_goes_on_and_then_rests(heart, teller):
    with heart.active(teller, LEASE, PATIENCE):
        teller.log.until(lambda calls: calls.count("beat") > 3)
        assert "rest" not in teller.log.calls
    assert heart.settle(PATIENCE)
    assert teller.log.calls[-1] == "rest"


def test_it_goes_on_until_all_attempts_are_over(heart, teller):
    with heart.active(teller, LEASE, PATIENCE):
        with heart.active(teller, LEASE, PATIENCE):
            pass
        beats = len(teller.log.calls)
        teller.log.until(lambda calls: len(calls) > beats + 1)
        assert "resting" not in teller.log.calls


def test_it_goes_on_until_all_that_was_said_is_in_the_log(teller):
    """Invariant 2."""
    # Many beats in a long lease: that it is patient for a lease only, is of no matter here.
    heart = Heartbeat(teller, beats_per_lease=1000)
    with heart.active(teller, PATIENCE, PATIENCE):
        teller.backlog = 1
    over = len(teller.log.calls)
    teller.log.until(lambda calls: len(calls) > over + 1)
    teller.backlog = 0
    assert heart.settle(PATIENCE)
    assert teller.log.calls[over : over + 2] == ["beat", "beat"]
    assert teller.log.calls[-1] == "rest"


def test_what_is_not_taken_for_a_whole_lease_keeps_nobody_alive(heart, teller):
    """Invariant 3."""
    with heart.active(teller, LEASE, PATIENCE):
        teller.backlog = 1  # for ever, as of a publisher that was closed
    assert heart.settle(PATIENCE)
    assert teller.log.calls.count("beat") > 3
    assert teller.log.calls[-1] == "rest"


def test_a_server_that_does_not_hear_is_waited_for_with_what_is_left_to_tell(heart, teller):
    teller.log.faults = 10
    with heart.active(teller, LEASE, PATIENCE):
        teller.backlog = 1
    teller.log.until(lambda calls: calls.count("beat") > 10)
    assert "resting" not in teller.log.calls[:10]
    assert heart.settle(PATIENCE)


def test_the_rest_of_an_old_attempt_does_not_undo_the_beat_of_a_new_one(heart, teller):
    """Invariant 5."""
    teller.log.gate.clear()
    with heart.active(teller, LEASE, PATIENCE):
        pass
    teller.log.until(lambda calls: calls[-1] == "resting")
    threading.Timer(0.02, teller.log.gate.set).start()
    with heart.active(teller, LEASE, PATIENCE):
        calls = list(teller.log.calls)
        assert set(calls[calls.index("rest") + 1 :]) == {"beat"}


def test_an_attempt_after_a_rest_is_beaten_for_anew(heart, teller):
    for _ in range(2):
        with heart.active(teller, LEASE, PATIENCE):
            pass
        assert heart.settle(PATIENCE)
    assert teller.log.calls.count("rest") == 2
    assert teller.log.calls.index("beat", teller.log.calls.index("rest")) > 0


def test_beats_that_are_not_heard_are_tried_again_and_hold_no_save_up(heart, teller):
    teller.log.faults = 3
    with heart.active(teller, LEASE, 0.001):
        teller.log.until(lambda calls: calls.count("beat") > 4)


def test_who_is_not_patient_begins_before_a_beat_is_heard(heart, teller):
    teller.log.faults = 3
    with heart.active(teller, LEASE, patience=0.0):
        assert not heart._heard
        teller.log.until(lambda calls: calls.count("beat") > 3)


def test_a_publisher_has_one_heart(heart, teller):
    assert Heartbeat.of(teller) is heart
    assert Heartbeat.of(Teller()) is not heart


def test_an_attempt_that_has_ended_shortens_the_lease_no_longer(heart, teller):
    """Invariant 4."""

    def beats_with(lease):
        teller.log.until(lambda _: teller.log.leases[-1:] == [lease])

    with heart.active(teller, LEASE, PATIENCE):
        with heart.active(teller, LEASE / 2, PATIENCE):
            beats_with(LEASE / 2)
        beats_with(LEASE)


def test_a_save_is_alive_on_the_server_from_before_its_start_until_its_end_is_known(
    sync_client, run_id
):
    """Invariant 7 of coordinator.py."""
    publisher = Publisher(SyncEventLog(sync_client, run_id), 1, new_producer("actor"))
    coordinator = CheckpointCoordinator(
        publisher, lease=30, timeouts=SaveTimeouts(first_heartbeat=PATIENCE)
    )
    key = heartbeat_key(run_id, publisher.producer.incarnation)
    alive = []
    coordinator.save_sync(lambda: alive.append(sync_client.pttl(key)), 1)
    coordinator.wait_all()
    assert 0 < alive[0] <= 30_000
    assert not sync_client.exists(key)
    events = [decode_envelope(entry.payload).event for entry in publisher.log.read()]
    assert [(type(event), getattr(event, "lease", 30)) for event in events] == [
        (SaveStarted, 30),
        (SaveFinished, 30),
    ]
    publisher.close()
