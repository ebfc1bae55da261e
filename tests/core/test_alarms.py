"""Each alarm is raised by its planted cause, cleared without it, and silent on a healthy run.

Numbers in names and comments are those of the invariants of `core/alarms.py`.
"""

import math
import random

import pytest

from tests.support.event_histories import History
from trinity_events.analysis.troubles import find_troubles
from trinity_events.core.alarms import PATIENCE, AlarmJudge
from trinity_events.core.limits import KEPT_ALARMS
from trinity_events.views.metrics import ServerMetrics
from trinity_schemas import AlarmCleared, AlarmRaised, RunOpened
from trinity_workers.config.sections.alarms import AlarmsConfig

THRESHOLDS = {name: getattr(AlarmsConfig(), name) for name in AlarmsConfig.__struct_fields__}
SHARES = (
    "equal_rewards",
    "truncated_answers",
    "empty_answers",
    "repeated_answers",
    "infra_failed_rate",
)


def healthy(step: int, rng: random.Random) -> dict[str, float]:
    """Return metrics of a policy that learns: noise, a rising reward, and a falling entropy."""
    return {
        "reward": 0.2 + 0.6 * step / 100 + rng.gauss(0, 0.05),
        "rollout_entropy": 2.0 * math.exp(-step / 20),
        "reward_parts/format": 0.5 + rng.gauss(0, 0.05),
        "reward_parts/answer": 0.2 + 0.6 * step / 100 + rng.gauss(0, 0.05),
        "rollout/equal_rewards": min(max(0.5 + rng.gauss(0, 0.2), 0.0), 0.97),
        "rollout/truncated_answers": 0.1,
        "rollout/empty_answers": 0.0,
        "rollout/repeated_answers": 0.02,
        "rollout/infra_failed_rate": 0.0,
    }


def judge_all(series, thresholds=THRESHOLDS):
    judge = AlarmJudge(thresholds)
    return [
        event for step, metrics in enumerate(series) for event in judge.judge_step(step, metrics)
    ]


def named(events, kind=AlarmRaised):
    return [event.alarm for event in events if isinstance(event, kind)]


@pytest.mark.parametrize("seed", range(10))
def test_ten_healthy_runs_raise_no_alarm(seed):
    rng = random.Random(seed)
    assert judge_all([healthy(step, rng) for step in range(200)]) == []


@pytest.mark.parametrize("name", SHARES)
def test_a_share_is_raised_once_after_some_steps_and_cleared_after_as_many(name):
    rng = random.Random(0)
    series = [healthy(step, rng) for step in range(60)]
    for step in range(20, 40):
        series[step][f"rollout/{name}"] = 1.0
    raised, cleared = judge_all(series)
    assert (raised.alarm, raised.step) == (name, 20 + PATIENCE - 1)
    assert (raised.value, raised.threshold) == (1.0, THRESHOLDS[name])
    assert f"alarms.{name}" in raised.sentence
    assert cleared == AlarmCleared(alarm=name, step=40 + PATIENCE - 1)


def test_one_bad_step_or_a_missing_number_raises_nothing():  # 2, 3
    rng = random.Random(0)
    series = [healthy(step, rng) for step in range(60)]
    for step in range(0, 60, PATIENCE):
        for at in range(step, step + PATIENCE - 1):
            series[at]["rollout/empty_answers"] = 1.0
    for at in range(60):
        series[at]["rollout/truncated_answers"] = math.nan
    assert judge_all(series) == []


def test_a_threshold_of_none_is_off():
    off = dict.fromkeys(THRESHOLDS)
    series = [{f"rollout/{name}": 1.0 for name in SHARES}] * 50
    assert judge_all(series, off) == []
    judge = AlarmJudge(off)
    for step in range(30):
        judge.judge_step(step, {}, 1.0)
    assert judge.stalled_after is None
    assert judge.judge_transfer(1, "explorer-0", 1, 1e9) is None


def judge_trouble(thresholds):
    """Return all verdicts on a run in which everything that has an alarm goes wrong."""
    judge = AlarmJudge(thresholds)
    events = []
    for step in range(100):
        metrics = dict.fromkeys((f"rollout/{name}" for name in SHARES), 0.99)
        metrics |= {"reward": 0.5, "rollout_entropy": 2.0 if step < 20 else 0.01}
        metrics |= {"reward_parts/length": 0.01 * step, "reward_parts/answer": -0.01 * step}
        events += judge.judge_step(step, metrics, 10.0)
        events.append(judge.judge_transfer(step, "explorer-0", 10**8, 1.0))
    events.append(judge.judge_stall(100, 1e4, "training"))
    return {event.alarm for event in events if event is not None}


@pytest.mark.parametrize("name", THRESHOLDS)
def test_each_threshold_decides_its_own_alarm_and_no_other(name):
    thresholds = THRESHOLDS | {"transfer_rate": 1e9}
    assert judge_trouble(thresholds) == THRESHOLDS.keys()
    # Beyond all measurements; these two are floors.
    lax = {"entropy_collapse": 1e-6, "transfer_rate": 1.0}.get(name, 1e6)
    assert judge_trouble(thresholds | {name: lax}) == THRESHOLDS.keys() - {name}


def test_entropy_collapse_needs_a_reward_that_is_no_higher():  # 5
    def series(reward_after):
        return [
            {"reward": 0.5 if step < 20 else reward_after, "rollout_entropy": entropy}
            for step, entropy in enumerate([2.0] * 20 + [0.01] * 20)
        ]

    assert named(judge_all(series(0.4))) == ["entropy_collapse"]
    assert named(judge_all(series(0.9))) == []


def test_reward_parts_that_move_apart_are_named():
    rng = random.Random(0)

    def series(slope):
        return [
            {
                "reward_parts/length": 0.2 + 0.02 * step + rng.gauss(0, 0.02),
                "reward_parts/answer": 0.8 + slope * step + rng.gauss(0, 0.02),
            }
            for step in range(60)
        ]

    [raised] = judge_all(series(-0.02))
    assert raised.alarm == "reward_parts_apart"
    assert "length has risen while answer has fallen" in raised.sentence
    assert judge_all(series(0.02)) == []


def test_a_step_that_takes_far_longer_is_raised_while_it_runs_and_cleared_by_the_next():  # 4
    judge = AlarmJudge(THRESHOLDS)
    for step in range(1, 6):
        assert judge.stalled_after is None
        judge.judge_step(step, {}, 12.0)
    assert judge.stalled_after == 120.0
    assert judge.judge_stall(6, 119.0, "training") is None
    raised = judge.judge_stall(6, 120.0, "waiting-rollouts")
    assert (raised.alarm, raised.step, raised.value) == ("stalled_step", 6, 10.0)
    assert "waiting-rollouts" in raised.sentence
    assert judge.judge_stall(6, 500.0, "waiting-rollouts") is None
    assert named(judge.judge_step(6, {}, 600.0), AlarmCleared) == ["stalled_step"]
    assert judge.stalled_after == 120.0  # a median, which one slow step does not move


def test_steps_of_a_moment_are_not_stalled_by_a_pause_of_the_machine():
    judge = AlarmJudge(THRESHOLDS)
    for step in range(1, 30):
        judge.judge_step(step, {}, 0.1)
    assert judge.stalled_after == 60.0


def test_transfers_below_the_floor_are_raised():
    judge = AlarmJudge(THRESHOLDS | {"transfer_rate": 1e8})
    rates = [judge.judge_transfer(step, "explorer-1", 10**8, 2.0) for step in range(PATIENCE)]
    assert rates[:-1] == [None] * (PATIENCE - 1)
    assert (rates[-1].alarm, rates[-1].value) == ("transfer_rate", 5e7)
    cleared = [judge.judge_transfer(9, "explorer-1", 10**8, 0.5) for _ in range(PATIENCE)]
    assert cleared[-1] == AlarmCleared(alarm="transfer_rate", step=9)


def test_a_slow_explorer_raises_an_alarm_whatever_the_others_do():
    judge = AlarmJudge(THRESHOLDS | {"transfer_rate": 1e8})

    def transfer(seconds_by_explorer):
        events = [
            judge.judge_transfer(1, explorer, 10**8, seconds)
            for _ in range(PATIENCE)
            for explorer, seconds in seconds_by_explorer.items()
        ]
        return [type(event) for event in events if event is not None]

    assert transfer({"explorer-0": 0.5, "explorer-1": 2.0}) == [AlarmRaised]
    assert transfer({"explorer-0": 2.0, "explorer-1": 0.5}) == []  # one of them is slow still
    assert transfer({"explorer-0": 0.5, "explorer-1": 0.5}) == [AlarmCleared]


def alarm(name="empty_answers", step=3):
    return AlarmRaised(alarm=name, step=step, value=0.5, threshold=0.2, sentence="50% are empty")


def fold_state(history):
    return history.fold()[0].state


def test_a_raised_alarm_is_a_trouble_and_a_metric_until_it_is_cleared_or_the_epoch_ends():
    history = History()
    history.add(alarm())
    state = fold_state(history)
    assert state.alarms["empty_answers"].sentence == "50% are empty"
    assert [trouble.words for trouble in find_troubles(state)] == ["alarm (empty_answers)"]
    metrics = ServerMetrics()
    run = metrics.add("run")

    def value():
        return run.registry.get_sample_value(
            "trinity_alarm", {"run": "run", "alarm": "empty_answers"}
        )

    run.update(state, [], 0)
    assert value() == 1
    history.add(AlarmCleared(alarm="empty_answers", step=9))
    run.update(fold_state(history), [], 0)
    assert (fold_state(history).alarms, value()) == ({}, 0)
    history.add(alarm())
    history.add(RunOpened(), epoch=2)
    assert fold_state(history).alarms == {}


def test_the_state_keeps_few_alarms_whatever_the_log_says():
    history = History()
    for number in range(2 * KEPT_ALARMS):
        history.add(alarm(f"a{number}"))
    assert len(fold_state(history).alarms) == KEPT_ALARMS
