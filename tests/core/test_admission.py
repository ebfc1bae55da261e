"""Whose turn it is: what the fold grants under each save strategy."""

import pytest
from msgspec import structs

from tests.support.event_histories import History, failed, finished, part, slot, started
from trinity_events.analysis.explain import explain
from trinity_events.core import decode_state, encode_state
from trinity_schemas import (
    ExpiredAttempt,
    LeaseExpired,
    Process,
    Producer,
    RunOpened,
    RunResumed,
    SaveGranted,
    SaveRequested,
)

LIMITING = ("single_thread", "single_process", "single_node")


def run(strategy="single_process", epoch=1):
    history = History(epoch, opened=False)
    history.add(RunOpened(save_strategy=strategy))
    return history


def asks(history, save_id, *, host="a", pid=1, rank=0, step=1, name="model", start=0, lease=None):
    event = SaveRequested(
        save_id=save_id,
        slot=slot(step, rank=rank, name=name),
        process=Process(host=host, pid=pid, started=start),
        lease=lease,
    )
    history.add(event, by=f"{host}-{pid}", rank=rank)


def ends(history, save_id, *, rank=0, step=1, name="model"):
    history.add(finished(step, save_id, rank=rank, name=name), by="ends", rank=rank)


def granted(history):
    return [event.save_id for event in history.fold()[1] if isinstance(event, SaveGranted)]


def anomalies(history):
    return history.fold()[0].state.anomaly_counts


@pytest.mark.parametrize("strategy", LIMITING)
def test_the_first_to_ask_has_its_turn_at_once(strategy):
    history = run(strategy)
    asks(history, "one")
    assert granted(history) == ["one"]


def test_single_thread_lets_one_save_run_at_a_time_in_the_order_of_asking():
    history = run("single_thread")
    for save_id in ("one", "two", "three"):
        asks(history, save_id, name=save_id)
    assert granted(history) == ["one"]
    ends(history, "one", name="one")
    assert granted(history) == ["one", "two"]
    ends(history, "two", name="two")
    assert granted(history) == ["one", "two", "three"]


def test_all_that_a_process_has_waiting_go_together():
    history = run("single_process")
    asks(history, "a1", pid=1, name="m1")
    asks(history, "b1", pid=2, name="m1")
    asks(history, "c1", pid=3, name="m1")
    asks(history, "b2", pid=2, name="m2")
    ends(history, "a1", name="m1")
    assert granted(history) == ["a1", "b1", "b2"]


def test_the_running_group_is_joined_while_nobody_else_waits():
    history = run("single_process")
    asks(history, "a1", pid=1, name="m1")
    asks(history, "a2", pid=1, name="m2")
    assert granted(history) == ["a1", "a2"]


def test_nobody_overtakes_a_group_that_waits():
    history = run("single_process")
    asks(history, "a1", pid=1, name="m1")
    asks(history, "b1", pid=2, name="m1")
    asks(history, "a2", pid=1, name="m2")
    assert granted(history) == ["a1"]
    ends(history, "a1", name="m1")
    assert granted(history) == ["a1", "b1"]
    ends(history, "b1", name="m1")
    assert granted(history) == ["a1", "b1", "a2"]


def test_a_turn_ends_with_the_last_of_its_group():
    history = run("single_node")
    asks(history, "a1", host="a", name="m1")
    asks(history, "a2", host="a", pid=2, name="m2")
    asks(history, "b1", host="b", name="m1")
    ends(history, "a1", name="m1")
    assert granted(history) == ["a1", "a2"]
    ends(history, "a2", name="m2")
    assert granted(history) == ["a1", "a2", "b1"]


def test_processes_with_one_number_on_two_hosts_are_two():
    history = run("single_process")
    asks(history, "a", host="a", pid=7)
    asks(history, "b", host="b", pid=7)
    assert granted(history) == ["a"]


def test_a_number_that_is_used_again_is_another_process():
    history = run("single_process")
    asks(history, "old", pid=7, start=1, name="m1")
    asks(history, "new", pid=7, start=2, name="m2")
    assert granted(history) == ["old"]


def test_processes_of_one_node_run_together():
    history = run("single_node")
    asks(history, "one", pid=1, name="m1")
    asks(history, "two", pid=2, name="m2")
    assert granted(history) == ["one", "two"]


def test_unrestricted_grants_whoever_asks_all_the_same():
    history = run("unrestricted")
    asks(history, "one", pid=1)
    asks(history, "two", pid=2)
    assert granted(history) == ["one", "two"]
    assert history.fold()[0].state.turns == {}


def test_a_failed_save_frees_its_turn():
    history = run("single_thread")
    asks(history, "one", name="m1")
    asks(history, "two", name="m2")
    history.add(failed(1, "one", name="m1"), by="a-1")
    assert granted(history) == ["one", "two"]


def expires(history, *save_ids, name="model"):
    history.add(
        LeaseExpired(
            holder=Producer(role="actor", rank=0, node="a", incarnation="a-1"),
            lease=15.0,
            attempts=tuple(
                ExpiredAttempt(save_id=save_id, slot=slot(1, name=name)) for save_id in save_ids
            ),
        ),
        by="reducer",
    )


def test_an_expired_lease_passes_the_turn_on():
    history = run("single_thread")
    asks(history, "one", name="m1", lease=15.0)
    asks(history, "two", name="m2", lease=15.0)
    expires(history, "one", name="m1")
    assert granted(history) == ["one", "two"]


def test_one_that_died_while_it_waited_is_passed_over():
    history = run("single_thread")
    for save_id in ("one", "two", "three"):
        asks(history, save_id, name=save_id, lease=15.0)
    expires(history, "two", name="two")
    ends(history, "one", name="one")
    assert granted(history) == ["one", "three"]


def test_when_the_only_other_group_gives_up_the_running_one_is_joined():
    history = run("single_process")
    asks(history, "a1", pid=1, name="m1")
    asks(history, "b1", pid=2, name="m1", lease=15.0)
    asks(history, "a2", pid=1, name="m2")
    expires(history, "b1", name="m1")
    assert granted(history) == ["a1", "a2"]


def test_one_that_was_taken_for_dead_may_ask_again():
    history = run("single_thread")
    asks(history, "one", name="m1", lease=15.0)
    expires(history, "one", name="m1")
    asks(history, "one", name="m1", lease=15.0)
    assert granted(history) == ["one", "one"]


def test_asking_twice_is_granted_once():
    history = run("single_thread")
    asks(history, "one")
    asks(history, "one")
    assert granted(history) == ["one"]


def test_a_save_of_a_slot_that_is_finished_is_answered_too():
    history = run("single_thread")
    history.add(finished(1, "before"), by="x")
    asks(history, "again")
    assert granted(history) == ["again"]
    ends(history, "again")
    assert history.fold()[0].state.turns == {}


def test_a_new_epoch_forgets_the_turns_of_the_old_one():
    history = run("single_thread")
    asks(history, "one", name="m1")
    asks(history, "two", name="m2")
    history.add(RunResumed(step=0, save_strategy="single_node"), epoch=2)
    state = history.fold()[0].state
    assert (state.turns, state.queue, state.attempts) == ({}, {}, {})
    assert state.strategy == "single_node"


def test_a_start_without_a_turn_is_told_and_counts():
    history = run("single_thread")
    history.add(started(1, "rash"), by="x")
    history.add(finished(1, "rash"), by="x")
    assert anomalies(history) == {"out-of-turn": 1}
    slots = history.fold()[0].state.steps[1].kinds["state_dict"].slots
    assert next(iter(slots.values())).proof.save_id == "rash"


def test_a_start_in_turn_is_no_anomaly():
    history = run("single_thread")
    asks(history, "one")
    history.add(started(1, "one"), by="a-1")
    assert anomalies(history) == {}


def test_a_part_under_the_name_of_a_save_that_waits_takes_its_place_and_stops_no_run():
    history = run("single_thread")
    for save_id in ("one", "two", "three"):
        asks(history, save_id, name=save_id)
    history.add(structs.replace(part(1), save_id="two"))
    ends(history, "one", name="one")
    assert granted(history) == ["one", "three"]


def test_the_next_save_of_a_name_ends_a_turn_whose_end_was_lost():
    history = run("single_thread")
    asks(history, "one", step=1)
    asks(history, "two", step=2)
    assert granted(history) == ["one", "two"]
    assert anomalies(history) == {"unended-turn": 1}


def test_turns_and_the_queue_survive_a_snapshot():
    history = run("single_process")
    asks(history, "a1", pid=1, name="m1")
    asks(history, "b1", pid=2, name="m1")
    monitor, _ = history.fold()
    state = decode_state(encode_state(monitor.state))
    assert list(state.turns) == ["a1"]
    assert list(state.queue.values()) == [["b1"]]


def test_explain_says_who_has_the_turn():
    history = run("single_thread")
    asks(history, "one", name="m1")
    asks(history, "two", name="m2", step=2)
    text = explain(history.fold()[0].state, 2)
    assert "m2 of actor-0 (waiting for its turn for 0.0 s)" in text
    assert "the turn is with m1 of actor-0 for state_dict step 1" in text
