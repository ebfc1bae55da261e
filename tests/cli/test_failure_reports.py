"""Failures of a run as they are shown: once for each cause, and to the end of the run."""

import re

import pytest

from tests.support.event_histories import History, committed, failed, registration, slot, started
from tests.support.pipeline import accept_reports
from trinity_events.analysis.explain import explain
from trinity_events.analysis.failures import failures
from trinity_events.log import AsyncPublisher, new_producer
from trinity_schemas import DeadlineReached, ExplorerStatusChanged, RunClosed, SaveFailed

FULL = "[Errno 28] No space left on device: '/ckpt/run/.staging/epoch_1_step_{}_0a/actor/x.pt'"


def full_disk(step, kind, rank=0):
    return SaveFailed(
        save_id=f"s{step}-{kind}-{rank}",
        slot=slot(step, kind, rank),
        error_type="OSError",
        message=FULL.format(step),
    )


def test_failures_of_one_cause_are_told_together():
    history = History()
    for step in range(100, 1100, 100):
        history.add(full_disk(step, "state_dict", rank=step // 100 % 2), by="actor")
        history.add(committed(step, "checkpoint", registration("checkpoint", 2)))
        history.add(full_disk(step, "checkpoint"), by="actor")
    history.add(failed(1100, kind="checkpoint"), by="actor")
    reports = failures(history.fold()[0].state)
    assert [(report.kinds, report.steps) for report in reports] == [
        (("state_dict",), tuple(range(100, 1100, 100))),
        (("checkpoint",), tuple(range(100, 1100, 100))),
        (("checkpoint",), (1100,)),
    ]
    assert reports[0].sentence.startswith(
        "Steps 100, 200, 300, ..., 1000 (10 of them): state_dict FAILED; the last: "
    )
    assert "/epoch_1_step_1000_0a/" in reports[0].sentence
    assert reports[2].sentence.startswith("Step 1100 checkpoint FAILED: ")


def test_a_checkpoint_that_failed_with_its_state_dict_is_told_with_it():
    history = History()
    history.add(
        committed(1, "checkpoint", registration("state_dict", 1), registration("checkpoint", 1))
    )
    history.add(failed(1), by="actor")
    state = history.fold()[0].state
    [failure] = failures(state)
    assert failure.kinds == ("state_dict", "checkpoint")
    first, second = explain(state, 1).splitlines()
    assert first.startswith("Step 1 state_dict FAILED: model of actor-0")
    assert second == "Step 1 checkpoint FAILED with its state_dict."


def test_ages_stop_when_the_run_has_ended():
    history = History()
    history.add(committed(1, "state_dict", registration()))  # at 1001
    history.add(started(1), by="actor")
    history.add(RunClosed(reason="failed", error="ValueError: no"))
    history.add(DeadlineReached(step=2, kind="state_dict", seconds=5.0), by="reducer")
    explanation = explain(history.fold()[0].state, 1, now=99_000)
    assert explanation == (
        "Step 1 state_dict was not complete when the run ended: it lacked 1 of 1 saves: model of "
        "actor-0 (started 0.0 s ago); committed 0.0 s before."
    )


@pytest.fixture
async def full_disk_run(publisher, log, run_id):
    """A run that a full disk ended, while its explorer was at work."""
    explorer = AsyncPublisher(log, 1, new_producer("explorer", 0))
    actor = AsyncPublisher(log, 1, new_producer("actor"))
    await explorer.publish(ExplorerStatusChanged(status="running"))
    await accept_reports(log)
    for step in range(10, 60, 10):
        await publisher.publish(committed(step, "checkpoint", registration("checkpoint", 1)))
        await actor.publish(full_disk(step, "checkpoint"))
    error = "SaveError: background save training_state of step 50 failed: OSError: full"
    await publisher.publish(RunClosed(reason="failed", error=error))
    return run_id


async def test_status_of_a_run_that_a_full_disk_ended_says_failed_and_blames_no_explorer(
    cli, full_disk_run
):
    shown = cli("status", full_disk_run, env={"COLUMNS": "400"}).stdout
    assert re.search(
        r"^Steps 10, 20, 30, \.\.\., 50 \(5 of them\): checkpoint FAILED; the last: .*No space",
        shown,
        re.MULTILINE,
    )
    assert "waits for" not in shown
    assert shown.count("No space left") == 1
    [explorer] = [line for line in shown.splitlines() if line.startswith("explorer-0")]
    assert explorer.split()[1] == "ended"
