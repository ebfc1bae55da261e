"""What the passing of time makes true of a state."""

from tests.support.event_histories import History, committed, finished, registration, slot, started
from trinity_events.analysis.explain import explain
from trinity_events.core import (
    MonitorState,
    Waiting,
    expired,
    lease_holders,
    overdue,
    waiting,
)
from trinity_events.core.limits import KEPT_UNDER_WAY
from trinity_events.core.state import Attempt
from trinity_schemas import (
    MAX_EVENT_BYTES,
    Envelope,
    Process,
    Producer,
    RunOpened,
    SaveRequested,
    SaveStarted,
    Slot,
    encode,
)


def leased(step, save_id, lease, **at):
    return SaveStarted(save_id=save_id, slot=slot(step, **at), lease=lease)


def test_only_those_who_send_heartbeats_must_be_heard_of():
    history = History()
    history.add(started(1, "quiet"), by="old")
    history.add(leased(1, "one", 5.0, rank=1), by="new")
    history.add(leased(2, "two", 9.0, rank=1), by="new")
    holders = lease_holders(history.fold()[0].state)
    assert {name: holder.lease for name, holder in holders.items()} == {"new-0": 5.0}


def test_a_silent_process_was_not_heard_of_for_its_shortest_lease():
    history = History()
    history.add(leased(1, "long", 15.0, rank=1), by="dead")
    history.add(leased(2, "short", 5.0, rank=1), by="dead")
    [event] = expired(history.fold()[0].state, {"dead-0"})
    assert event.lease == 5.0
    assert [attempt.save_id for attempt in event.attempts] == ["long", "short"]


def test_a_silent_process_loses_all_it_has_under_way():
    history = History()
    history.add(leased(1, "runs", 5.0, rank=1), by="dead")
    request = SaveRequested(
        save_id="waits", slot=slot(2), process=Process(host="h", pid=1, started=1), lease=5.0
    )
    history.add(request, by="dead")
    history.add(leased(1, "other", 5.0, rank=2), by="alive")
    history.add(leased(1, "over", 5.0, rank=3), by="dead", rank=0)
    history.add(finished(1, "over", rank=3), by="dead")
    [event] = expired(history.fold()[0].state, {"dead-0"})
    assert event.holder.role == "dead"
    assert [attempt.save_id for attempt in event.attempts] == ["runs", "waits"]


def test_all_that_a_silent_process_can_have_under_way_fits_into_events():
    holder = Producer(role="r" * 127, rank=0, node="n" * 256, incarnation="dead")
    state = MonitorState(run_id="r" * 63)
    for number in range(KEPT_UNDER_WAY):
        at = Slot(
            step=number, kind="checkpoint", role=holder.role, rank=0, name="\N{GRINNING FACE}" * 256
        )
        state.attempts[f"{number:0127}"] = Attempt(slot=at, holder=holder, since=1, lease=5.0)
    events = expired(state, {"dead"})
    assert [attempt.save_id for event in events for attempt in event.attempts] == list(
        state.attempts
    )
    assert all(len(encode(_from_a_reducer(event))) < MAX_EVENT_BYTES for event in events)


def _from_a_reducer(event):
    by = Producer(role="reducer", rank=0, node="here", incarnation="one")
    return Envelope(run_id="run", epoch=1, producer=by, sequence=1, occurred_at=1.0, event=event)


def test_nobody_silent_expires_nothing():
    history = History()
    history.add(leased(1, "one", 5.0), by="alive")
    assert expired(history.fold()[0].state, set()) == []


def test_what_is_committed_and_incomplete_has_a_deadline():
    history = History()
    history.add(committed(1, "state_dict", registration(expected=1)))
    history.add(committed(2, "state_dict", registration(expected=0)))
    history.add(started(3))
    state = history.fold()[0].state
    assert waiting(state) == [Waiting(1, 1, "state_dict", 1001)]
    assert overdue(state, set(), 10.0) == []
    [deadline] = overdue(state, waiting(state), 10.0)
    assert (deadline.step, deadline.kind, deadline.seconds) == (1, "state_dict", 10.0)


def test_what_was_failed_by_its_deadline_is_not_overdue_again():
    history = History()
    history.add(committed(1, "state_dict", registration(expected=1)))
    late = waiting(history.fold()[0].state)
    [event] = overdue(history.fold()[0].state, late, 10.0)
    history.add(event, by="reducer")
    state = history.fold()[0].state
    assert overdue(state, late, 10.0) == []
    assert waiting(state) == []


def test_what_was_late_in_an_epoch_is_not_in_the_next():
    history = History()
    history.add(committed(1, "state_dict", registration(expected=1)))
    late = waiting(history.fold()[0].state)
    history.add(RunOpened(), epoch=2)
    history.add(committed(1, "state_dict", registration(expected=1)), epoch=2)
    assert overdue(history.fold()[0].state, late, 10.0) == []


def test_explain_counts_to_the_present():
    history = History()
    history.add(committed(1, "state_dict", registration(expected=1)))
    assert "committed 4.0 s ago." in explain(history.fold()[0].state, 1, now=5001)
