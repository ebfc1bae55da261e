"""The best checkpoint is that of the step whose weights were evaluated, and nothing removes it."""

import pytest

from trinity_events.core.best_checkpoint import (
    add_score,
    best_checkpoint,
    complete_score,
    continue_best,
)
from trinity_events.core.decisions.checkpoint_retention import Evidence, removable_steps
from trinity_events.core.state import MonitorState, ReadyPointer
from trinity_schemas import BestBy, EvaluationFinished, StepRef


def evaluate(state: MonitorState, step: int, value: float, *, epoch: int = 1, mode="max") -> None:
    finished = EvaluationFinished(
        name="held-out",
        version=StepRef(epoch, step),
        metrics={"mean": value},
        best_by=BestBy("mean", mode),
    )
    add_score(state, finished)


def complete(state: MonitorState, *steps: int) -> None:
    for step in steps:
        state.complete_checkpoints.append(step)
        complete_score(state, step)


def best_step(state: MonitorState) -> int | None:
    best = best_checkpoint(state)
    return None if best is None else best.at.step


@pytest.fixture
def state() -> MonitorState:
    return MonitorState(run_id="mine", epoch=1)


@pytest.mark.parametrize(("mode", "expected"), [("max", 4), ("min", 2)])
def test_the_best_score_of_a_complete_checkpoint_is_chosen(state, mode, expected):
    complete(state, 2, 4, 6)
    for step, value in ((2, 0.1), (4, 0.9), (6, 0.5)):
        evaluate(state, step, value, mode=mode)
    assert best_step(state) == expected


def test_a_better_step_counts_once_its_checkpoint_is_complete_and_never_without_one(state):
    complete(state, 2)
    evaluate(state, 2, 0.5)
    evaluate(state, 3, 0.9)  # a step that is not saved
    evaluate(state, 4, 0.8)
    assert best_step(state) == 2
    complete(state, 4)
    assert best_step(state) == 4
    complete(state, 6)
    evaluate(state, 6, 0.8)
    assert best_step(state) == 4, "of equal ones the first"


def test_a_long_run_forgets_neither_its_best_checkpoint_nor_grows(state):
    complete(state, 2)
    evaluate(state, 2, 0.5)
    state.complete_checkpoints.clear()  # the state knows of the newest ones alone
    for step in range(3, 600):
        evaluate(state, step, 0.6)
    assert best_step(state) == 2
    assert len(state.best.scores) < 100


def test_a_resume_forgets_the_scores_of_steps_that_it_discards(state):
    complete(state, 2, 4)
    evaluate(state, 2, 0.5)
    evaluate(state, 4, 0.9)
    state.lineage, state.epoch = [StepRef(1, 2)], 2
    continue_best(state)
    assert best_step(state) == 2
    evaluate(state, 2, 0.4, epoch=2)
    assert best_checkpoint(state).value == 0.4, "the last result of a step counts"


def test_another_metric_begins_again_and_numbers_that_are_not_finite_do_not_count(state):
    complete(state, 2, 4)
    evaluate(state, 2, 0.9)
    evaluate(state, 4, float("nan"))
    assert best_step(state) == 2
    evaluate(state, 4, 0.2, mode="min")
    assert best_step(state) == 4
    add_score(state, EvaluationFinished(name="x", version=StepRef(1, 6), metrics={"mean": 0.0}))
    assert best_step(state) == 4, "a set that chooses nothing"


def test_retention_never_removes_it(state):
    complete(state, 2, 4, 6, 8)
    evaluate(state, 4, 0.9)
    state.ready["checkpoint"] = ReadyPointer(at=StepRef(1, 8), entry_id="1-1")
    made = {step: Evidence(epoch=1, step=step, kinds=("checkpoint",)) for step in (2, 4, 6, 8)}
    assert removable_steps(state, made, 1) == [2, 6]
    evaluate(state, 6, 0.95)
    assert removable_steps(state, made, 1) == [2, 4]
