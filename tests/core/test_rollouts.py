"""The fold's ledger follows the events of the lineage that stands."""

from __future__ import annotations

import math

import msgspec
import pytest

from tests.support.event_histories import RUN, History
from trinity_events.analysis.audit import Auditor
from trinity_events.analysis.explain import explain
from trinity_events.analysis.summary import Summarizer
from trinity_events.core import decode_state, encode_state
from trinity_events.core.ledger import Ledger
from trinity_events.core.limits import KEPT_EXCEPTIONS, KEPT_EXCLUDED
from trinity_schemas import (
    ExplorerExcluded,
    LedgerRestored,
    ReissuedRollout,
    RolloutsDispatched,
    RunOpened,
    RunResumed,
    StepRef,
    StepTrained,
)

FINGERPRINT = "sha256:" + "1" * 64


def dispatched(*ordinals, again=()):
    reissued = tuple(
        ReissuedRollout(ordinal=ordinal, attempt=2, reason="deadline") for ordinal in again
    )
    return RolloutsDispatched(ordinals=ordinals, reissued=reissued, fingerprint=FINGERPRINT)


def restored(ledger: Ledger, step: int) -> LedgerRestored:
    contract = ledger.to_contract(step)
    return LedgerRestored(ledger=contract, digest=contract.digest)


def trained_through_step_2() -> History:
    history = History()
    history.add(dispatched((0, 15)))
    history.add(StepTrained(step=1, trained=((0, 3),)))
    history.add(dispatched((16, 19), again=(4,)))
    history.add(StepTrained(step=2, trained=((5, 8),), dropped={"filtered": ((10, 10),)}))
    return history


def test_the_state_has_the_fate_of_every_dispatched_ordinal():
    state = trained_through_step_2().fold()[0].state
    ledger = state.ledger
    assert (ledger.trained, ledger.dropped) == (8, {"filtered": 1})
    assert ledger.open_ranges() == [(4, 4), (9, 9), (11, 19)]
    assert ledger.fingerprint == FINGERPRINT
    assert (state.trainer_step, state.anomaly_counts) == (2, {})


@pytest.mark.parametrize(
    ("metrics", "models"),
    [
        ({"skipped_updates": 1.0}, ["policy"]),
        ({"skipped_updates": 2.0, "critic/skipped_updates": 1.0}, ["policy", "critic"]),
        ({"skipped_updates": 0.0, "critic/skipped_updates": math.nan}, []),
    ],
)
def test_skipped_updates_are_an_anomaly_and_a_sentence_about_their_step_and_no_other(
    metrics, models
):
    history = trained_through_step_2()
    history.add(StepTrained(step=3, trained=((11, 14),), metrics=metrics))
    state = history.fold()[0].state
    assert state.anomaly_counts == ({"update-skipped": len(models)} if models else {})
    assert state.ledger.trained == 12, "the prompts of a skipped update were trained"
    named = [model for model in ("policy", "critic") if f"of the {model}" in explain(state, 3)]
    assert named == models
    assert "skipped" not in explain(state, 2)


def test_a_snapshot_keeps_the_ledger():
    state = trained_through_step_2().fold()[0].state
    assert decode_state(encode_state(state)) == state


@pytest.mark.parametrize(
    ("event", "anomaly", "ordinals"),
    [
        (StepTrained(step=3, trained=((3, 5),)), "trained-twice", "3, 5 in step 3"),
        (StepTrained(step=3, trained=((19, 21),)), "fate-without-dispatch", "20 to 21 in step 3"),
        (
            StepTrained(step=3, dropped={"filtered": ((8, 9),)}),
            "dropped-after-fate",
            "8 (filtered)",
        ),
        (
            StepTrained(step=3, dropped={"attempts": ((21, 21),)}),
            "fate-without-dispatch",
            "21 (attempts)",
        ),
        (
            RolloutsDispatched(dropped={"filtered": ((8, 9),)}),
            "dropped-after-fate",
            "8 (filtered)",
        ),
        (dispatched((4, 8)), "dispatched-after-fate", "5 to 8"),
        (dispatched(again=(0, 4)), "dispatched-after-fate", "0"),
        (dispatched(again=(30,)), "reissued-without-dispatch", "30"),
        (dispatched((22, 23)), "dispatch-gap", "20 to 21"),
    ],
)
def test_a_contradiction_is_an_anomaly_that_names_the_ordinals(event, anomaly, ordinals):
    history = trained_through_step_2()
    history.add(event)
    state = history.fold()[0].state
    assert state.anomaly_counts == {anomaly: 1}
    assert state.anomalies[-1].detail == f"ordinals {ordinals}"


def test_a_contradiction_leaves_the_other_ordinals_of_its_event_their_fates():
    history = trained_through_step_2()
    history.add(StepTrained(step=3, trained=((3, 9),)))
    ledger = history.fold()[0].state.ledger
    assert ledger.trained == 10  # 4 and 9; the others had a fate.
    assert ledger.open_ranges() == [(11, 19)]


def test_an_ordinal_in_two_fates_of_one_step_is_an_anomaly():
    history = trained_through_step_2()
    history.add(StepTrained(step=3, trained=((9, 9),), dropped={"filtered": ((9, 9),)}))
    assert history.fold()[0].state.anomaly_counts == {"dropped-after-fate": 1}


def test_a_new_epoch_that_is_opened_begins_an_empty_ledger():
    history = trained_through_step_2()
    history.add(RunOpened(), epoch=2)
    assert history.fold()[0].state.ledger is None
    history.add(dispatched((0, 3)), epoch=2)
    ledger = history.fold()[0].state.ledger
    assert ledger.open_ranges() == [(0, 3)]


def test_a_resume_goes_on_with_the_ledger_of_its_checkpoint():
    history = trained_through_step_2()
    at_step_1 = Ledger(mark=4, next=16, trained=4, fingerprint=FINGERPRINT)
    history.add(RunResumed(step=1, checkpoint=StepRef(1, 1)), epoch=2)
    assert history.fold()[0].state.ledger is None
    history.add(restored(at_step_1, 1), epoch=2)
    # The discarded epoch trained 5 to 8: in this lineage they are open, and trained once.
    history.add(dispatched((4, 19)), epoch=2)
    history.add(StepTrained(step=2, trained=((4, 7),)), epoch=2)
    state = history.fold()[0].state
    assert (state.ledger.trained, state.ledger.mark, state.anomaly_counts) == (8, 8, {})
    # A trainer of the old epoch wakes up: it changes nothing.
    history.add(StepTrained(step=3, trained=((9, 12),)), epoch=1, by="old")
    state = history.fold()[0].state
    assert (state.ledger.trained, state.anomaly_counts) == (8, {"stale-epoch": 1})


def test_an_excluded_explorer_is_known_until_the_next_epoch():
    history = History()
    for rank in (*range(KEPT_EXCLUDED + 1), 1):
        excluded = ExplorerExcluded(explorer=f"explorer-{rank}", malformed=3, reason=f"no. {rank}")
        history.add(excluded)
    state = history.fold()[0].state
    last = [f"explorer-{rank}" for rank in (*range(2, KEPT_EXCLUDED + 1), 1)]
    assert list(state.excluded) == last, "the last ones"
    assert (state.excluded["explorer-1"].malformed, state.excluded["explorer-1"].reason) == (
        3,
        "no. 1",
    )
    assert decode_state(encode_state(state)) == state
    history.add(RunOpened(), epoch=2)
    assert history.fold()[0].state.excluded == {}


def audited(history):
    auditor = Auditor(RUN)
    for _, envelope in history.entries:
        auditor.add(envelope)
    return auditor.audit()


def test_what_a_trainer_dropped_before_its_end_counts_until_a_resume_asks_for_it_again():
    history = trained_through_step_2()
    at_step_2 = history.fold()[0].state.ledger
    history.add(RolloutsDispatched(dropped={"filtered": ((11, 18),), "attempts": ((19, 19),)}))
    ledger = history.fold()[0].state.ledger
    assert (ledger.trained, ledger.dropped) == (8, {"filtered": 9, "attempts": 1})
    audit = audited(history)
    assert audit.balanced
    assert audit.lineages[-1].dropped == ledger.dropped
    assert audit.lineages[-1].dropped_ordinals["filtered"] == [(10, 18)]
    history.add(RunResumed(step=2, checkpoint=StepRef(1, 2)), epoch=2)
    history.add(restored(at_step_2, 2), epoch=2)
    history.add(dispatched((11, 19)), epoch=2)
    history.add(StepTrained(step=3, trained=((11, 19),)), epoch=2)
    state, audit = history.fold()[0].state, audited(history)
    assert (state.ledger.trained, state.ledger.dropped) == (17, {"filtered": 1})
    assert (audit.balanced, audit.lineages[-1].trained, state.anomaly_counts) == (True, 17, {})


UNSOUND = Ledger(mark=4, next=16, trained=4, fingerprint=FINGERPRINT)


@pytest.mark.parametrize(
    ("event", "detail"),
    [
        (restored(UNSOUND, 2), "of step 2, and the run goes on from 1"),
        (
            msgspec.structs.replace(restored(UNSOUND, 1), digest="sha256:" + "0" * 64),
            "differs from its digest",
        ),
        (restored(msgspec.structs.replace(UNSOUND, trained=3), 1), "counts 3 fates for 4"),
    ],
)
def test_an_unsound_ledger_is_not_taken(event, detail):
    history = trained_through_step_2()
    history.add(RunResumed(step=1), epoch=2)
    history.add(event, epoch=2)
    state = history.fold()[0].state
    assert (state.ledger, state.anomaly_counts) == (None, {"unsound-ledger": 1})
    assert detail in state.anomalies[-1].detail


def test_a_ledger_is_restored_once_and_before_anything_is_dispatched():
    history = trained_through_step_2()
    history.add(RunResumed(step=1), epoch=2)
    history.add(dispatched((0, 3)), epoch=2)
    history.add(restored(UNSOUND, 1), epoch=2)
    state = history.fold()[0].state
    assert state.anomaly_counts == {"unsound-ledger": 1}
    assert state.ledger.open_count == 4


def test_the_summary_counts_every_trained_step_also_without_a_commit():
    summarizer = Summarizer("history")
    for _, envelope in trained_through_step_2().entries:
        summarizer.add(envelope, 8)
    assert summarizer.summary().steps == 2


def test_the_summary_tells_staleness_by_sample_and_what_was_issued_again():
    history = trained_through_step_2()
    history.add(dispatched(again=(1, 2)))
    history.add(StepTrained(step=3, staleness={0: 4, 1: 12}))
    history.add(StepTrained(step=4, staleness={1: 16}))
    summarizer = Summarizer("history")
    before = Summarizer("history")
    for _, envelope in trained_through_step_2().entries:
        before.add(envelope, 8)
    for _, envelope in history.entries:
        summarizer.add(envelope, 8)
    summary, earlier = summarizer.summary(), before.summary()
    assert summary.staleness == {0: 4, 1: 28}
    assert summary.reissued["deadline"] == earlier.reissued.get("deadline", 0) + 2


def test_a_ledger_of_too_many_exceptions_is_an_anomaly_and_stays_as_it_was():
    history = trained_through_step_2()
    monitor, _ = history.fold()
    state = monitor.state
    state.ledger.dispatch(20, 20 + 2 * KEPT_EXCEPTIONS)
    free = KEPT_EXCEPTIONS - len(state.ledger.settled)
    state.ledger.train(range(21, 21 + 2 * free, 2))
    history.add(StepTrained(step=3, trained=((19, 19),)))
    monitor.apply(*history.entries[-1])
    assert state.anomaly_counts.keys() == {"ledger-full"}
    assert 19 in state.ledger.open_ordinals()
