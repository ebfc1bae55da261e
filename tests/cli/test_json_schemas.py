"""What commands print with ``--json``, held to the schemas of these documents."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from typer import Context
from typer.main import get_group

from tests.support.event_histories import committed, failed, registration, started
from tests.support.pipeline import folded, publish_steps, reducer_task
from tests.support.waits import child
from trinity_events.cli.app import build
from trinity_events.core import MonitorState
from trinity_events.core.state import RewardError
from trinity_events.log import AsyncPublisher, new_producer
from trinity_events.views import state_as_json
from trinity_events.views.documents import document_schema
from trinity_schemas import (
    ExplorerStatusChanged,
    RolloutsDispatched,
    RunClosed,
    StepTrained,
    SyncRequested,
    WaitStarted,
)
from trinity_workers.documents import DOCUMENTS

FAILURES = str(Path(__file__).parents[1] / "recorded" / "failures.jsonl")


def schema_of(name):
    schema = document_schema(DOCUMENTS[name])
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.fixture
async def run(publisher, log, redis_url, run_id):
    """A run with something of everything: waits, saves, failures, prompts and garbage."""
    explorer = AsyncPublisher(log, publisher.epoch, new_producer("explorer", 0))
    actor = AsyncPublisher(log, publisher.epoch, new_producer("actor"))
    async with reducer_task(redis_url, run_id):
        await publish_steps(publisher, [1, 2])
        await explorer.publish(ExplorerStatusChanged(status="running"))
        await explorer.publish(SyncRequested())
        await publisher.publish(RolloutsDispatched(ordinals=((0, 7),)))
        await publisher.publish(StepTrained(step=2, trained=((0, 3),), metrics={"loss": 0.5}))
        await publisher.publish(committed(3, "state_dict", registration(expected=2)))
        await actor.publish(started(3, "a"))
        await actor.publish(failed(3, "b", rank=1))
        await publisher.publish(WaitStarted(wait_id="w", what="rollouts", seconds=9.0))
        await log.append(b"\xff garbage")
        await folded(log)
    return run_id


COMMANDS = {
    "runs": ("runs", "--json"),
    "status": ("status", "RUN", "--json"),
    "explain": ("explain", "RUN", "3", "--proof", "--json"),
    "tail": ("tail", "RUN", "--json"),
    "tail-cloudevents": ("tail", "RUN", "--format", "cloudevents"),
    "replay": ("replay", "RUN", "--json"),
    "replay-step": ("replay", "RUN", "--step", "--json"),
    "diff": ("diff", "RUN", "1", "2", "--json"),
    "bisect": ("bisect", "RUN", "trainer_step == 2", "--json"),
    "audit": ("audit", "RUN", "--json"),
    "verify": ("verify", FAILURES, "--json"),
}
LINE_BY_LINE = ("tail", "tail-cloudevents", "replay-step")


@pytest.mark.parametrize("name", COMMANDS)
async def test_what_a_command_prints_is_what_its_schema_says(cli, run, name):
    validator = schema_of(name)
    shown = cli(*(run if word == "RUN" else word for word in COMMANDS[name]))
    lines = shown.stdout.splitlines()
    assert lines
    if name != "runs":  # which warns of runs that other tests spoil
        assert shown.stderr == ""
    assert len(lines) == 1 or name in LINE_BY_LINE
    for line in lines:
        validator.validate(json.loads(line))


PROCESS = """
import sys
from trinity_events.diagnostics.stacks import enable_stack_dumps

enable_stack_dumps(sys.argv[1], "actor-1")
enable_stack_dumps(sys.argv[1], "explorer-7")  # of which the log has nothing
print("ready", flush=True)
sys.stdin.read()
"""


async def test_status_lists_the_processes_of_an_open_run_on_this_host(cli, run, publisher):
    command = [sys.executable, "-c", PROCESS, run]
    with child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        status = json.loads(cli("status", run, "--json").stdout)
        schema_of("status").validate(status)
        running = {"pid": process.pid, "condition": "running"}
        # The reducer runs in this process, which has a name if an earlier test gave it one.
        status["processes"].pop("reducer-0", None)
        assert status["processes"] == {"actor-1": running, "explorer-7": running}
        assert re.search(rf"^actor-1 +{process.pid} +running", cli("status", run).stdout, re.M)
        process.kill()
        process.wait()
        shown = cli("status", run).stdout
        assert re.search(rf"^actor-1 +{process.pid} +ended", shown, re.M)
        assert "explorer-7" not in shown
    await publisher.publish(RunClosed(reason="finished"))
    assert "ON THIS HOST" not in cli("status", run).stdout


def test_the_moment_of_a_reward_error_is_in_seconds_with_fractions():
    error = RewardError(at=1_500, entry_id="1500-0", sentence="it fails")
    state = MonitorState(run_id="failed", reward_errors={"judge": error})
    shown = state_as_json(state)
    assert shown["reward_errors"]["judge"]["at"] == 1.5
    schema_of("replay").validate(json.loads(json.dumps(shown)))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_schema_refuses_what_no_command_prints(name):
    assert not schema_of(name).is_valid({"nonsense": 1})
    assert not schema_of(name).is_valid("text")


def test_the_effective_configuration_is_what_its_schema_says(cli, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("")
    shown = cli("train", str(config), "--check", "--json")
    assert shown.returncode == 0, shown.stderr
    schema_of("train-check").validate(json.loads(shown.stdout))


def test_every_command_with_json_has_a_schema():
    group = get_group(build())
    with_json = {
        name
        for name in group.list_commands(Context(group))
        if any("--json" in option.opts for option in group.get_command(Context(group), name).params)
    }
    assert with_json <= DOCUMENTS.keys()


WITHOUT_EXTRAS = """
import sys

sys.modules |= dict.fromkeys(sys.argv[1:])  # None: an import of it fails
from trinity_workers.documents import schema_files

print(len(schema_files()))
"""


@pytest.mark.processes
def test_the_build_generates_every_schema_with_the_dependencies_of_the_base_alone():
    extras = ("torch", "numpy", "ray", "transformers", "tokenizers", "safetensors", "yaml", "httpx")
    command = [sys.executable, "-c", WITHOUT_EXTRAS, *extras, "packaging"]
    generated = subprocess.run(command, capture_output=True, text=True, check=False)
    assert generated.stderr == ""
    assert int(generated.stdout) > len(DOCUMENTS)
