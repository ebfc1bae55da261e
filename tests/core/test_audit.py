"""The audit balances the books of each lineage, as a counter over raw entries does."""

from __future__ import annotations

import pytest

from tests.support.rollout_histories import FINGERPRINT, RUN, TrainerHistory, count_raw
from trinity_events.analysis.audit import Auditor
from trinity_events.core import Monitor, MonitorState
from trinity_events.core.ordinal_ranges import ordinals
from trinity_schemas import decode_envelope

SEEDS = range(60)


def audit(history: TrainerHistory):
    auditor = Auditor(RUN)
    for _, payload in history.entries:
        auditor.add(decode_envelope(payload))
    return auditor.audit()


def folded(history: TrainerHistory) -> MonitorState:
    monitor = Monitor(MonitorState(run_id=RUN))
    for entry_id, payload in history.entries:
        monitor.apply(entry_id, decode_envelope(payload))
    return monitor.state


@pytest.mark.parametrize("seed", SEEDS)
def test_the_audit_counts_what_an_independent_counter_counts(seed):
    history = TrainerHistory(seed)
    report, counts = audit(history), count_raw(payload for _, payload in history.entries)
    assert report.balanced, report.lineages
    assert len(report.lineages) == len(counts)
    for books, count in zip(report.lineages, counts, strict=True):
        assert count.wrong == []
        assert books.dispatched == count.next
        assert books.trained == count.trained
        assert books.dropped == dict(count.dropped)
        assert list(ordinals(books.open_ordinals)) == count.open
        assert books.open == len(count.open)
        assert books.recomputed == {why: n for why, n in count.recomputed.items() if n}
        assert books.staleness == dict(count.staleness)
        assert (books.steps, books.discarded_steps) == (count.steps, count.discarded_steps)
        assert books.fingerprint == FINGERPRINT or not books.dispatched


@pytest.mark.parametrize("seed", SEEDS)
def test_the_audit_ends_with_the_trainers_own_books_and_with_the_folds_ledger(seed):
    history = TrainerHistory(seed)
    [*_, books] = audit(history).lineages
    own = history.books
    if history.books.next:
        settled = [ordinal for ordinal in own.fates if ordinal not in history.pending]
        assert books.dispatched == own.next
        assert books.trained + sum(books.dropped.values()) == len(settled)
    state = folded(history)
    anomalies = state.anomaly_counts.keys()
    assert anomalies <= {"duplicate", "stale-epoch"}, state.anomalies
    if state.ledger is not None:
        assert state.ledger.open_ranges() == books.open_ordinals
        assert (state.ledger.trained, state.ledger.dropped) == (books.trained, books.dropped)


def test_the_histories_have_what_the_audit_is_about():
    reports = [audit(TrainerHistory(seed)) for seed in SEEDS]
    books = [lineage for each in reports for lineage in each.lineages]
    assert max(len(each.lineages) for each in reports) > 1
    assert max(len(lineage.spans) for lineage in books) > 2
    assert sum(lineage.discarded_steps > 0 for lineage in books) > 10
    assert {why for lineage in books for why in lineage.recomputed} == {
        *("resumed", "deadline", "failed", "stale")
    }
    assert any(lineage.open for lineage in books)
    assert all(any(why in lineage.dropped for lineage in books) for why in ("filtered", "attempts"))
    assert any(each.ignored for each in reports)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("train-twice", "trained-twice"),
        ("train-unasked", "fate-without-dispatch"),
        ("skip", "dispatch-gap"),
        ("no-ledger", "no-ledger"),
        ("forget-a-fate", "fate-lost"),
        ("wrong-digest", "ledger-digest"),
    ],
)
@pytest.mark.parametrize("seed", range(10))
def test_a_lie_of_the_trainer_does_not_balance(seed, fault, named):
    history = TrainerHistory(seed, fault=fault)
    report = audit(history)
    assert not report.balanced
    assert count_raw(payload for _, payload in history.entries)[-1].wrong
    [*others, last] = report.lineages
    assert all(lineage.balanced for lineage in others)
    assert named in {contradiction.name for contradiction in last.contradictions}
