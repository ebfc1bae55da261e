"""The fold keeps the first reward error of each cause, bounded, until the next epoch."""

from msgspec.structs import replace

from tests.support.event_histories import History
from tests.support.event_samples import SAMPLES
from trinity_events.analysis.summary import Summarizer
from trinity_events.core.limits import KEPT_REWARD_ERRORS
from trinity_events.core.reward_errors import (
    REWARD_ERRORS,
    REWARD_FAILED,
    count_failed_prompts,
    is_first_of_cause,
)
from trinity_schemas import RewardErrorReported, RolloutsDispatched, RunOpened, StepTrained

ERROR = replace(
    next(sample for sample in SAMPLES if isinstance(sample, RewardErrorReported)), epoch=1
)


def reported(*errors, by="explorer"):
    history = History()
    entries = [history.add(error, by=by) for error in errors]
    return history.fold()[0].state, entries


def test_the_first_error_of_each_type_and_place_is_kept_with_its_entry():
    other_place = replace(ERROR, place="reward.py, line 9")
    again = replace(ERROR, ordinal=8, response="6")
    state, entries = reported(ERROR, again, other_place, replace(ERROR, error_type="ValueError"))
    entry_ids = [error.entry_id for error in state.reward_errors.values()]
    assert entry_ids == [entries[0], *entries[2:]]
    assert state.anomaly_counts == {}
    assert is_first_of_cause(state, entries[0], ERROR)
    assert not is_first_of_cause(state, entries[1], again)


def test_the_trainers_own_report_of_an_error_that_is_known_changes_nothing():
    history = History()
    first = history.add(ERROR, by="explorer")
    history.add(ERROR)
    assert [error.entry_id for error in history.fold()[0].state.reward_errors.values()] == [first]


def test_an_error_of_another_epoch_is_not_shown():
    state, _ = reported(replace(ERROR, epoch=2))
    assert state.reward_errors == {}
    history = History()
    history.add(ERROR, by="explorer")
    history.add(RunOpened(), epoch=2)
    assert history.fold()[0].state.reward_errors == {}


def test_causes_beyond_the_limit_are_anomalies():
    lines = range(KEPT_REWARD_ERRORS + 2)
    errors = [replace(ERROR, place=f"reward.py, line {line}") for line in lines]
    state, entries = reported(*errors)
    assert [error.entry_id for error in state.reward_errors.values()] == entries[
        :KEPT_REWARD_ERRORS
    ]
    assert state.anomaly_counts == {"reward-error-not-kept": 2}


def test_the_summary_counts_dropped_prompts_and_samples_with_a_score():
    history = History()
    history.add(RolloutsDispatched(ordinals=((0, 9),)))
    history.add(StepTrained(step=1, dropped={REWARD_FAILED: ((0, 1),)}, metrics={REWARD_ERRORS: 3}))
    history.add(StepTrained(step=2, dropped={"filtered": ((2, 2),)}, metrics={REWARD_ERRORS: 1}))
    history.add(RolloutsDispatched(dropped={REWARD_FAILED: ((5, 5),)}))
    summarizer = Summarizer("history")
    for _, envelope in history.entries:
        summarizer.add(envelope, 8)
    summary = summarizer.summary()
    assert (summary.dropped, summary.reward_errors) == ({"filtered": 1, REWARD_FAILED: 3}, 4)
    assert count_failed_prompts(history.fold()[0].state) == 3
