"""Entries that prove the outcome of a step, found again by hand."""

import pytest

from tests.support.event_histories import (
    History,
    committed,
    failed,
    finished,
    opened,
    part,
    registration,
    started,
)
from trinity_events.analysis.proof import Proof, format_proof
from trinity_events.core import Monitor, MonitorState
from trinity_schemas import DeadlineReached, ThreadCountRegistered


def proof_of(history, step):
    monitor, proof = Monitor(MonitorState(run_id="history")), Proof(step)
    for entry_id, envelope in history.entries:
        for number, announcement in enumerate(monitor.apply(entry_id, envelope)):
            proof.add_announcement(f"{entry_id}{number}", announcement)
    for entry_id, envelope in history.entries:
        proof.add(entry_id, envelope)
    return proof.entries


def parts(entries):
    return [(entry.part, entry.id) for entry in entries if entry.stream == "events"]


def test_ready_weights_are_proven_by_the_parts_that_the_announcement_names():
    history = History()
    version = history.add(opened(3, 0, 1), by="worker")
    first = history.add(part(3, 0), by="worker")
    commit = history.add(committed(3, "weights"))
    history.add(opened(4, 0), by="worker")
    second = history.add(part(3, 1), by="worker", rank=1)
    entries = proof_of(history, 3)
    assert parts(entries) == [
        ("expects", version),
        ("commits", commit),
        ("finishes", first),
        ("finishes", second),
    ]
    assert [entry.id for entry in entries if entry.final] == [second]
    [ready] = [entry for entry in entries if entry.part == "announces"]
    assert (ready.type, ready.what[:7]) == ("step-ready", "sha256:")


def test_of_a_retried_save_only_the_attempt_that_counts_is_a_proof():
    history = History()
    expected = history.add(ThreadCountRegistered(step=1, registration=registration()))
    commit = history.add(committed(1, "state_dict", registration()))
    history.add(started(1, "first"), by="actor")
    history.add(failed(1, "first"), by="actor")
    history.add(started(1, "second"), by="actor")
    done = history.add(finished(1, "second"), by="actor")
    entries = [entry for entry in proof_of(history, 1) if entry.type != "step-failed"]
    assert parts(entries) == [("expects", expected), ("commits", commit), ("finishes", done)]
    assert format_proof(entries[2]).startswith(f"> {done:<18} state_dict finishes  save-finished")


def test_a_failure_is_proven_by_the_failed_save_and_what_was_under_way_is_told():
    history = History()
    history.add(committed(1, "state_dict", registration(expected=2)))
    begun = history.add(started(1, "a"), by="actor")
    wrong = history.add(failed(1, "b", rank=1), by="actor", rank=1)
    entries = proof_of(history, 1)
    assert ("starts", begun) in parts(entries)
    assert [(entry.part, entry.id) for entry in entries if entry.final] == [("fails", wrong)]
    assert entries[-1].what.endswith("disk full")


def test_a_deadline_is_the_proof_of_a_step_that_was_never_complete():
    history = History()
    history.add(committed(1, "state_dict", registration()))
    late = history.add(DeadlineReached(step=1, kind="state_dict", seconds=9.0), by="reducer")
    [end] = [entry for entry in proof_of(history, 1) if entry.final]
    assert (end.id, end.what) == (late, "not complete 9 s after its commit")


@pytest.mark.parametrize("step", [2, 99])
def test_a_step_that_is_not_known_has_no_proof(step):
    history = History()
    history.add(committed(1, "state_dict", registration()))
    assert proof_of(history, step) == []
