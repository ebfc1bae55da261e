"""Rewards and pace of trained steps, in a bounded number of points."""

import json

import pytest

from tests.support.event_histories import History
from trinity_events.analysis.troubles import find_troubles
from trinity_events.core.learning import Learning
from trinity_events.core.limits import KEPT_REWARDS, KEPT_STEP_TIMES
from trinity_schemas import RolloutsDispatched, RunOpened, StepTrained


def trained(learning, first, last):
    for step in range(first, last + 1):
        learning.add(step, 1000 * step, {"reward": float(step)})


@pytest.mark.parametrize("steps", [1, 47, 48, 49, 97, 1000, 5000])
def test_points_are_bounded_and_keep_the_sum_of_all_rewards(steps):
    learning = Learning()
    trained(learning, 1, steps)
    assert len(learning.points) < KEPT_REWARDS
    assert sum(point.steps for point in learning.points) == steps
    total = sum(point.mean * point.steps for point in learning.points)
    assert total == pytest.approx(steps * (steps + 1) / 2)
    assert learning.points[-1].step == steps
    assert len(learning.step_times) == min(steps, KEPT_STEP_TIMES)


def test_pace_and_time_left_are_those_of_the_last_steps():
    learning = Learning(total_steps=100)
    assert learning.seconds_left(0) is None
    learning.add(1, 0, {})
    assert learning.seconds_per_step is None
    for step in range(2, 61):
        learning.add(step, 90_000 + 2000 * step, {})  # the start took longer
    assert learning.seconds_per_step == 2.0
    assert learning.seconds_left(60) == 80.0
    assert learning.reward is None


def test_first_and_last_reward_are_means_of_ten_steps():
    learning = Learning()
    trained(learning, 1, 40)
    assert (learning.first_reward, learning.reward) == (5.5, 35.5)


def test_a_resume_drops_the_points_of_discarded_steps():
    learning = Learning()
    trained(learning, 1, 30)
    learning.begin_epoch(20, json.dumps({"steps": 25}))
    assert learning.points[-1].step == 20
    assert learning.step_times == []
    assert learning.total_steps == 25


@pytest.mark.parametrize("config", [None, "[1]", "no JSON", '{"steps": -1}', '{"steps": "two"}'])
def test_a_configuration_without_steps_names_none(config):
    learning = Learning(total_steps=5)
    learning.begin_epoch(0, config)
    assert learning.total_steps is None


def test_the_fold_has_rewards_under_both_names_and_leaves_out_what_is_not_finite():
    history = History(opened=False)
    history.add(RunOpened(config=json.dumps({"steps": 9})))
    history.add(StepTrained(step=1, metrics={"reward": 0.5}))
    history.add(StepTrained(step=2, metrics={"reward/mean": 0.7}))
    history.add(StepTrained(step=3, metrics={"loss": 0.1}))
    state = history.fold()[0].state
    assert [point.mean for point in state.learning.points] == [0.5, 0.7]
    assert (state.learning.total_steps, len(state.learning.step_times)) == (9, 3)


def test_dropped_prompts_are_trouble_and_filtered_ones_are_not():
    history = History()
    history.add(RolloutsDispatched(ordinals=((0, 9),)))
    history.add(
        StepTrained(step=1, dropped={"attempts": ((0, 2),), "filtered": ((3, 4),)}, metrics={})
    )
    words = [(trouble.count, trouble.words) for trouble in find_troubles(history.fold()[0].state)]
    assert (3, "prompts dropped (attempts)") in words
    assert not any("filtered" in text for _, text in words)
