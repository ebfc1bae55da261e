"""The table at the end of a run: few rows, in plain words, and what went wrong stands out."""

import pytest
from msgspec import structs

from trinity_events.analysis.summary import RunSummary, Spread
from trinity_workers.launch.summary import (
    DemoSummary,
    EvaluationResults,
    FailedStep,
    NewestCheckpoint,
    summary_table,
)

TIMES = Spread(median=0.003, p99=0.2, max=0.3)


def make_summary(**changes):
    log = RunSummary(
        run_id="words",
        steps=60,
        versions_published=61,
        versions_applied=59,
        versions_superseded_unpulled=2,
        versions_unaccounted=0,
        versions_delta=0,
        bytes_published=1 << 20,
        bytes_saved=0,
        checkpoints_ready=3,
        failures=0,
        staleness={0: 5, 1: 95},
        stall=TIMES,
        transfer=TIMES,
        pause=TIMES,
        events=800,
        events_per_step=13.9,
        event_bytes_per_step=5184.0,
    )
    mean = {"mean": 0.29, "mean_low": 0.25, "mean_high": 0.33}
    summary = DemoSummary(
        run_id="words",
        outcome="finished",
        error=None,
        seconds=70.0,
        warm_up_steps=85,
        reward_first_third=0.32,
        reward_last_third=0.41,
        score_first_third=0.7,
        score_last_third=0.76,
        evaluations={
            "held-out": EvaluationResults(first_step=0, first=mean, last_step=60, last=mean)
        },
        staleness_mean=0.95,
        training_seconds=22.0,
        reducer_restarts=0,
        transport="shm",
        sharded=True,
        log=log,
        redis_url="unix:///redis.sock",
        checkpoint_folder="/runs/words",
        failed_steps=[],
        newest_checkpoint=NewestCheckpoint(step=60, folder="/runs/words/global_step_60"),
        replay_command="trinity-events replay words",
        next_command=None,
    )
    return structs.replace(summary, **changes)


def rows_of(summary):
    """Return the texts by the names of their rows."""
    table = summary_table(summary)
    names, texts = (column._cells for column in table.columns)
    return dict(zip(map(str, names), map(str, texts), strict=True))


def test_a_finished_run_has_ten_rows_and_says_what_can_be_done_next():
    rows = rows_of(make_summary())
    assert len(rows) <= 10
    assert rows["steps"] == "60 in 70 s: 367 ms a step, after 85 of warm-up"
    assert rows["reward"].startswith("0.32 -> 0.41 (means of")
    assert rows["answers"] == "100 trained on: 5% 0 steps old, 95% 1 step old"
    assert rows["look"] == "trinity-events dashboard; trinity-events samples words"
    assert "trinity-events convert /runs/words/global_step_60" in rows["replay"]


def test_a_reward_is_not_said_to_be_the_share_of_right_answers_and_has_no_second_row():
    rows = rows_of(make_summary(score_first_third=0.32, score_last_third=0.41))
    assert "exactly" not in "".join(rows.values())
    assert "score" not in rows


@pytest.mark.parametrize("outcome", ["failed", "interrupted"])
def test_what_went_wrong_is_bright_and_the_command_continues_the_run(outcome):
    summary = make_summary(
        outcome=outcome,
        error="actor-1 died",
        failed_steps=[FailedStep(step=40, kinds=["checkpoint"])],
        next_command="trinity-events train words.yaml",
    )
    rows = rows_of(summary)
    assert rows[outcome.upper()] == "actor-1 died"
    assert rows["go on"] == "from the checkpoint of step 60: trinity-events train words.yaml"
    styles = [cell.style for cell in summary_table(summary).columns[0]._cells]
    assert styles.count("bold bright_red") == 2


def test_weights_that_stay_where_they_are_have_no_zeros():
    assert "0" not in rows_of(make_summary(transport="none"))["weights"]
