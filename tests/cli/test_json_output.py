"""``--json`` prints JSON, whatever is in the log, and times in seconds."""

import json
import math
import time

import pytest

from tests.support.event_histories import History, committed, opened, registration, started
from tests.support.pipeline import accept_reports
from trinity_events.log import AsyncPublisher, new_producer
from trinity_events.views import state_as_json
from trinity_schemas import (
    ExplorerStatusChanged,
    RunClosed,
    StepCommitted,
    SyncRequested,
    WaitStarted,
)


def strictly(text: str):
    """As a program reads it whose language has no NaN."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


async def test_a_number_that_json_does_not_have_is_null(cli, publisher, run_id):
    metrics = {"loss": math.nan, "reward": math.inf, "kl": 0.5}
    await publisher.publish(StepCommitted(step=1, kind="weights", metrics=metrics))
    [*_, last] = cli("tail", run_id, "--json").stdout.splitlines()
    assert strictly(last)["event"]["metrics"] == {"loss": None, "reward": None, "kl": 0.5}


@pytest.mark.parametrize("command", ["status", "replay", "runs"])
async def test_moments_are_seconds_since_1970_in_every_command(
    cli, publisher, log, run_id, command
):
    explorer = AsyncPublisher(log, 1, new_producer("explorer", 0))
    await explorer.publish(ExplorerStatusChanged(status="running"))
    await explorer.publish(SyncRequested())
    await accept_reports(log)
    await publisher.publish(committed(1, "state_dict", registration()))
    await publisher.publish(started(1))
    await publisher.publish(RunClosed(reason="finished"))
    shown = cli(command, *(() if command == "runs" else (run_id,)), "--json")
    document = strictly(shown.stdout)
    if command == "runs":
        [document] = [run for run in document if run["run_id"] == run_id]
        moments = [document["opened_at"]]
    else:
        [step] = document["steps"].values()
        [slot] = step["kinds"]["state_dict"]["slots"].values()
        [explorer] = document["explorers"].values()
        [attempt] = document["attempts"].values()
        moments = [
            document["opened_at"],
            document["closed_at"],
            attempt["since"],
            slot["running"]["a"],
        ]
        moments += [explorer["heard_at"], explorer["requested_at"]]
        moments += [step["kinds"]["state_dict"]["committed_at"]]
    assert all(0 <= time.time() - moment < 300 for moment in moments), moments


def test_no_moment_of_the_state_is_forgotten():
    """Every time in the history is above a thousand milliseconds."""
    history = History()
    history.add(opened(1))
    history.add(committed(1, "weights"))
    history.add(started(2), by="actor")
    history.add(WaitStarted(wait_id="w", what="rollouts"))
    state = history.fold()[0].state

    def numbers(value):
        if isinstance(value, dict):
            return [number for inner in value.values() for number in numbers(inner)]
        if isinstance(value, list):
            return [number for inner in value for number in numbers(inner)]
        return [value] if isinstance(value, int | float) else []

    assert max(numbers(state_as_json(state))) < 1000
