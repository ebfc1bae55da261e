"""No alarm is raised over the logs of real runs that were healthy.

``tests/recorded_steps/healthy.jsonl`` has a run in each line: what it was, and the number, the
seconds and the judged metrics of each of its steps, from the ``step-trained`` of its log. The
older of them lack metrics that later versions measure, and are judged by the others.
"""

import json
from pathlib import Path

import pytest
from msgspec import structs

from trinity_events.core.alarms import AlarmJudge
from trinity_workers.config.sections.alarms import AlarmsConfig

FILE = Path(__file__).parents[1] / "recorded_steps" / "healthy.jsonl"
RUNS = [json.loads(line) for line in FILE.read_text().splitlines()]


def judge(steps):
    """Return the alarms of a run, each step judged while it is under way and at its end."""
    judge = AlarmJudge(structs.asdict(AlarmsConfig()))
    alarms, before = [], None
    for step, seconds, metrics in steps:
        duration = None if before is None else seconds - before
        if duration is not None:
            alarms.append(judge.judge_stall(step, duration, "training"))
        alarms += judge.judge_step(step, metrics, duration)
        before = seconds
    return [alarm for alarm in alarms if alarm is not None]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"])
def test_no_alarm_is_raised_in_a_healthy_run(run):
    assert len(run["steps"]) >= 10
    assert judge(run["steps"]) == []


def test_there_are_ten_runs_of_several_kinds_and_each_metric_is_judged():
    assert len(RUNS) >= 10
    assert len({run["name"] for run in RUNS}) == len(RUNS)
    measured = {name for run in RUNS for name in run["steps"][-1][2]}
    shares = ("equal_rewards", "truncated_answers", "empty_answers", "repeated_answers")
    assert {"rollout_entropy", "reward", *(f"rollout/{name}" for name in shares)} <= measured


@pytest.mark.parametrize("name", ["rollout/equal_rewards", "rollout/truncated_answers"])
def test_the_same_runs_raise_an_alarm_once_a_share_is_planted(name):
    for run in RUNS:
        steps = [(step, seconds, metrics | {name: 1.0}) for step, seconds, metrics in run["steps"]]
        assert [alarm.alarm for alarm in judge(steps)] == [name.removeprefix("rollout/")]
