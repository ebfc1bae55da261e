"""Evaluations in the fold: their versions stay while they are open, and resumes repeat none."""

import pytest

from tests.support.event_histories import History, committed, opened, part, verified
from trinity_events.analysis.metrics import MetricsReader
from trinity_events.core import decode_state, encode_state
from trinity_events.core.decisions.checkpoint_retention import removable_steps
from trinity_events.core.evaluations import evaluated_through, open_versions
from trinity_schemas import (
    EvaluationFailed,
    EvaluationFinished,
    EvaluationStarted,
    RunOpened,
    RunResumed,
    StepRef,
    VersionRetired,
)


def started(step, epoch=1, name="hard"):
    return EvaluationStarted(name=name, version=StepRef(epoch, step), questions=8, samples=4)


def finished(step, epoch=1, name="hard", **metrics):
    version = StepRef(epoch, step)
    return EvaluationFinished(
        name=name, version=version, metrics=metrics or {"mean": 0.5}, answers=32, seconds=2.0
    )


def publish(history, *steps):
    for step in steps:
        history.add(opened(step))
        history.add(part(step))
        history.add(committed(step, "weights"))


def retired(history):
    return [event.step for event in history.fold()[1] if isinstance(event, VersionRetired)]


def test_the_version_of_an_open_evaluation_is_not_retired_and_then_is():
    history = History()
    history.add(started(0))  # before the version is published: there is no moment between
    publish(history, 0, 1, 2, 3, 4)
    assert retired(history) == [1, 2]
    assert open_versions(history.fold()[0].state) == {StepRef(1, 0)}
    history.add(finished(0))
    assert retired(history) == [1, 2, 0]
    publish(history, 5)
    assert retired(history) == [1, 2, 0, 3]


def test_open_evaluations_keep_few_versions():
    history = History()
    for step in range(6):
        history.add(started(step, name=f"set-{step}"))
    publish(history, *range(8))
    state = history.fold()[0].state
    assert [version.step for version in state.versions] == [0, 1, 6, 7]


def test_a_failed_evaluation_frees_its_version_and_keeps_its_reason():
    history = History()
    history.add(started(0))
    publish(history, 0, 1, 2)
    history.add(EvaluationFailed(name="hard", version=StepRef(1, 0), reason="no explorer"))
    state = history.fold()[0].state
    assert retired(history) == [0]
    assert state.evaluations["hard"].last.failure == "no explorer"
    assert state.anomaly_counts == {}


def test_the_files_of_a_version_under_evaluation_stay():
    history = History()
    history.add(started(1))
    state = history.fold()[0].state
    state.complete_checkpoints = [1, 2, 3]
    made = verified(1, 1, 2, 3)
    state.ready = {}
    assert removable_steps(state, made, 1) == []
    from trinity_events.core.state import ReadyPointer

    state.ready["checkpoint"] = ReadyPointer(at=StepRef(1, 3), entry_id="1-0")
    assert removable_steps(state, made, 1) == [2]


def resumed(history, step, epoch):
    history.epoch = epoch
    history.add(RunResumed(step=step, checkpoint=StepRef(epoch - 1, step)))
    return history.fold()[0].state


@pytest.mark.parametrize(
    ("ended", "through"),
    [(10, (1, 10)), (20, (1, 20)), (30, (1, 20))],
    ids=["before the checkpoint", "at the checkpoint", "after it: that version stands no more"],
)
def test_a_resume_knows_which_versions_have_had_their_evaluation(ended, through):
    history = History()
    history.add(finished(ended))
    history.add(started(40))
    state = resumed(history, 20, 2)
    assert evaluated_through(state) == {"hard": StepRef(*through)}
    assert open_versions(state) == set(), "the new epoch asks again"


def test_a_second_resume_from_the_same_checkpoint_counts_no_discarded_version():
    history = History()
    history.add(finished(20))
    resumed(history, 20, 2)
    history.add(finished(30, epoch=2))
    history.epoch = 3
    history.add(RunResumed(step=20, checkpoint=StepRef(1, 20)))
    assert evaluated_through(history.fold()[0].state) == {"hard": StepRef(1, 20)}


def test_a_run_that_begins_anew_has_evaluated_nothing():
    history = History()
    history.add(finished(20))
    history.epoch = 2
    history.add(RunOpened())
    assert history.fold()[0].state.evaluations == {}


def test_a_snapshot_keeps_the_evaluations():
    history = History()
    history.add(finished(0))
    history.add(started(4))
    state = history.fold()[0].state
    assert decode_state(encode_state(state)) == state


def test_results_are_metrics_of_the_version_that_was_evaluated():
    reader, history = MetricsReader(), History()
    history.add(finished(3, mean=0.25, pass_at_4=0.5))
    metrics = reader.add(history.entries[-1][1])
    assert (metrics.epoch, metrics.step) == (1, 3)
    assert metrics.values == {
        "eval/hard/mean": 0.25,
        "eval/hard/pass_at_4": 0.5,
        "eval/hard/seconds": 2.0,
    }
