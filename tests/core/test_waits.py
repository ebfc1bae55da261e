"""The state names the open waits, and keeps none of a process that is gone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.support.event_histories import History
from trinity_events.core import decode_state, encode_state
from trinity_events.core.handlers.waits import find_wait_chains, open_waits
from trinity_events.core.limits import KEPT_WAIT_NAMES, KEPT_WAITS
from trinity_schemas import (
    ExplorerStatusChanged,
    LeaseExpired,
    Producer,
    RunClosed,
    RunOpened,
    RunResumed,
    WaitEnded,
    WaitStarted,
)


def started(wait_id="w", *waits_for, what="rollouts", seconds=0.5, deadline=60.0):
    return WaitStarted(
        wait_id=wait_id, what=what, waits_for=waits_for, seconds=seconds, deadline=deadline
    )


def waits(history) -> list[str]:
    return list(history.fold()[0].state.waits)


def test_a_wait_is_open_from_its_beginning_to_its_end():
    history = History()
    at = int(history.add(started("w", "explorer-0", seconds=0.2)).partition("-")[0])
    state = history.fold()[0].state
    [wait] = open_waits(state, at)
    assert (wait.by, wait.what, wait.waits_for) == ("trainer-0", "rollouts", ("explorer-0",))
    assert wait.since == at - 200
    assert decode_state(encode_state(state)) == state
    history.add(WaitEnded(wait_id="w", outcome="over"))
    history.add(WaitEnded(wait_id="w", outcome="over"))
    state = history.fold()[0].state
    assert (state.waits, state.anomaly_counts) == ({}, {})


def test_a_new_epoch_and_a_close_forget_the_waits_of_processes_that_may_be_dead():
    for event, epoch in (
        (RunOpened(), 2),
        (RunResumed(step=0), 2),
        (RunClosed(reason="finished"), 1),
    ):
        history = History()
        history.add(started())
        history.add(event, epoch=epoch)
        assert waits(history) == []


def test_a_process_that_started_again_no_longer_waits_as_it_did():
    history = History()
    history.add(started("old"), by="explorer", rank=1)
    history.add(started("other"), by="explorer", rank=2)
    history.add(started("new"), by="explorer", rank=1)
    assert waits(history) == ["old", "other", "new"]
    entry_id, envelope = history.entries[-1]
    producer = replace(envelope.producer, incarnation="second start")
    history.entries[-1] = entry_id, replace(envelope, producer=producer, sequence=1)
    assert waits(history) == ["other", "new"]


def test_a_report_of_a_wait_that_goes_on_changes_it_and_keeps_its_beginning():
    history = History()
    at = int(history.add(started("w", "explorer-0", seconds=0.2)).partition("-")[0])
    history.add(started("other"), by="actor")
    again = int(
        history.add(started("w", "explorer-1", what="weights", seconds=0.0)).partition("-")[0]
    )
    state = history.fold()[0].state
    wait = state.waits["w"]
    assert (wait.what, wait.waits_for) == ("weights", ("explorer-1",))
    assert (wait.since, wait.heard_at) == (at - 200, again)
    assert list(state.waits) == ["other", "w"]


def test_the_publishers_of_one_process_that_is_no_explorer_share_its_name():
    history = History()
    history.add(started("one"), by="trainer")
    entry_id, envelope = history.entries[-1]
    history.add(started("two"), by="trainer")
    producer = replace(envelope.producer, incarnation="another publisher")
    history.entries[-2] = entry_id, replace(envelope, producer=producer, sequence=1)
    assert waits(history) == ["one", "two"]


@pytest.mark.parametrize(
    ("event", "by", "remaining"),
    [
        (ExplorerStatusChanged(status="stopped"), "explorer", []),
        (ExplorerStatusChanged(status="running"), "explorer", ["w"]),
        (
            LeaseExpired(
                holder=Producer(role="explorer", rank=0, node="here", incarnation="another"),
                lease=15.0,
            ),
            "reducer",
            [],
        ),
    ],
)
def test_the_waits_of_a_process_that_stopped_or_was_taken_for_dead_are_over(event, by, remaining):
    history = History()
    history.add(started("w"), by="explorer")
    history.add(started("other"), by="explorer", rank=1)
    history.add(event, by=by)
    assert waits(history) == [*remaining, "other"]


def test_an_explorer_that_starts_again_waits_no_more_before_it_waits_anew():
    history = History()
    history.add(started("w"), by="explorer")
    history.add(ExplorerStatusChanged(status="running"), by="explorer")
    entry_id, envelope = history.entries[-1]
    producer = replace(envelope.producer, incarnation="second start")
    history.entries[-1] = entry_id, replace(envelope, producer=producer, sequence=1)
    assert waits(history) == []


def test_a_wait_that_is_reported_no_more_is_of_a_dead_process():
    history = History()
    at = int(history.add(started(deadline=None)).partition("-")[0])
    state = history.fold()[0].state
    assert [len(open_waits(state, at + ms)) for ms in (0, 190_000, 210_000)] == [1, 1, 0]
    history.add(started(deadline=None))
    state = history.fold()[0].state
    assert len(open_waits(state, at + 200_001)) == 1


def test_waits_of_explorers_outlive_their_epoch_and_those_of_trainers_do_not():
    history = History()
    history.add(RunOpened(), epoch=2, by="second")
    history.add(started("explorers"), by="explorer", epoch=1)
    history.add(started("trainers"), by="trainer", epoch=1)
    state = history.fold()[0].state
    assert (list(state.waits), state.anomaly_counts) == (["explorers"], {"stale-epoch": 1})


def test_the_open_waits_are_bounded_and_the_oldest_is_dropped():
    history = History()
    for number in range(KEPT_WAITS + 3):
        history.add(started(f"w{number}", *(f"explorer-{rank}" for rank in range(40))))
    open_waits = history.fold()[0].state.waits
    assert list(open_waits) == [f"w{number}" for number in range(3, KEPT_WAITS + 3)]
    assert {len(wait.waits_for) + wait.unnamed for wait in open_waits.values()} == {40}
    assert {len(wait.waits_for) for wait in open_waits.values()} == {KEPT_WAIT_NAMES}


def test_a_wait_long_past_its_deadline_is_of_a_dead_process():
    history = History()
    at = int(history.add(started(deadline=10.0)).partition("-")[0])
    state = history.fold()[0].state
    assert [len(open_waits(state, at + ms)) for ms in (0, 60_000, 80_000)] == [1, 1, 0]


def test_waits_are_told_as_chains_from_the_first_that_waits_to_the_last():
    history = History()
    history.add(started("c", what="its turn", deadline=None), by="actor", rank=1)
    history.add(started("b", "actor-1", what="the weights of step 4"), by="explorer", rank=0)
    at = history.add(started("a", "explorer-0", "explorer-3", what="rollouts"), by="trainer")
    lines = find_wait_chains(history.fold()[0].state, int(at.partition("-")[0]) + 1000)
    assert lines == [
        "trainer-0 waits for rollouts from explorer-0, explorer-3 for 1.5 s, and gives up in 58 s.",
        "  explorer-0 waits for the weights of step 4 from actor-1 for 1.5 s, and gives up in "
        "58 s.",
        "    actor-1 waits for its turn for 1.5 s.",
    ]


def test_processes_that_wait_for_each_other_are_told_once_each():
    history = History()
    history.add(started("a", "explorer-0"), by="trainer")
    at = history.add(started("b", "trainer-0"), by="explorer")
    lines = find_wait_chains(history.fold()[0].state, int(at.partition("-")[0]))
    assert [line.split()[0] for line in lines] == ["trainer-0", "explorer-0"]
