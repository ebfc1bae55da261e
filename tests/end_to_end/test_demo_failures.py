"""The main job when parts of it fail: told at once, to people and to programs, to the end."""

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.support.run_processes import TrainRun, small_run
from tests.support.sessions import session_members
from tests.support.waits import wait_until
from trinity_events.server import connect_sync
from trinity_schemas import RunKeys, StepReady, decode_envelope
from trinity_workers.launch.resume_command import resume_command

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def start(tmp_path, policy_folder, run_id, redis_url):
    """Starts a run on two ranks that saves a checkpoint after every other step."""
    started = []
    file = small_run(
        tmp_path,
        policy_folder,
        steps=100_000,
        trainer={"ranks": 2},
        checkpoints={"interval": 2, "root": str(tmp_path)},
    )

    def run(*args: str) -> TrainRun:
        started.append(TrainRun(file, "--run", run_id, *args))
        return started[-1]

    yield run
    for training in started:
        training.close()


@pytest.mark.heavy
def test_a_failed_checkpoint_is_a_line_at_once_and_in_the_table_of_an_interrupted_run(
    start, tmp_path, run_id, cli
):
    """By a signal that is sent again while it ends, as from a terminal and by what waits there."""
    (tmp_path / run_id).mkdir()
    (tmp_path / run_id / ".staging").touch()  # where folders of saves are to be made
    run = start()
    place = f"in {tmp_path / run_id}/.staging/epoch_1_step_2_"
    lines = run.until(lambda: [line for line in run.stderr_lines if "FAILED" in line])
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d step 2: ", lines[0])
    assert "NotADirectoryError: [Errno 20] Not a directory" in lines[0]
    assert place.replace("in ", "(writing ") in lines[0]
    run.until(
        lambda: [line for line in run.stderr_lines if re.search(r"staleness .* FAILED \d+", line)]
    )
    run.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    status, out, stderr = run.ended()
    assert status == 143
    assert f"run {run_id} was interrupted" in stderr
    assert "Traceback" not in stderr
    assert "SIGTERM received" not in stderr, "Ray has no last words"
    rows = dict(re.findall(r"^(\S+(?: \S+)*)  +(\S.*?) *$", out, re.MULTILINE))
    assert rows["run"] == run_id
    assert "INTERRUPTED" in rows
    assert re.match(r"of step \d+ \(checkpoint", rows["FAILED saves"])
    assert rows["checkpoints"] == "0 ready; no checkpoint to resume from"
    again = f"from step 1: TRINITY_HOME={os.environ['TRINITY_HOME']} trinity-events train"
    assert f"{again} {tmp_path}/small.yaml --run {run_id}" in " ".join(out.split())
    assert json.loads(cli("replay", run_id, "--json").stdout)["closed"] == "interrupted"
    wait_until(lambda: not session_members(run.process.pid))


@pytest.mark.nightly(
    "end_to_end/test_walkthrough.py::test_a_rank_that_was_killed_by_the_id_that_status_lists_is_in_the_object_of_the_run"
)
@pytest.mark.heavy
def test_a_trainer_that_is_killed_leaves_one_object_with_the_next_step(
    start, tmp_path, run_id, redis_url, cli
):
    """As a killed rank does in test_walkthrough.py."""
    run = start("--json")

    def ready():
        with connect_sync(redis_url) as client:
            entries = client.xrange(RunKeys.of(run_id).announcements)
        events = [decode_envelope(fields[b"e"]).event for _, fields in entries]
        return [
            event for event in events if isinstance(event, StepReady) and event.kind == "checkpoint"
        ]

    run.until(ready)
    victim = run.actor("Trainer")
    os.kill(victim, signal.SIGKILL)
    status, out, stderr = run.ended()
    assert status == 1
    [line] = out.splitlines()
    summary = json.loads(line)
    assert summary["outcome"] == "failed"
    assert re.fullmatch(
        rf"\w+: trainer-0 \(process {victim} on {socket.gethostname()}\) of .* died.*: "
        r"killed by SIGKILL .*",
        summary["error"],
    )
    assert summary["error"].partition(": ")[2] in stderr
    newest = summary["newest_checkpoint"]
    assert newest["folder"] == str(tmp_path / run_id / f"global_step_{newest['step']}")
    assert Path(newest["folder"]).is_dir()
    assert f"train {tmp_path}/small.yaml --run {run_id} --json" in summary["next_command"]
    assert summary["log"]["steps"] >= newest["step"]
    shown = cli("status", run_id, env={"COLUMNS": "300"}).stdout
    # A save that was under way when the summary was made may become ready after it.
    [step] = re.findall(r"newest ready checkpoint is that of step (\d+)", shown)
    assert int(step) >= newest["step"]


@pytest.mark.heavy
def test_what_is_wrong_from_the_start_is_one_object_too(cli):
    shown = cli("demo", "--json", "--run", "x", "--redis-url", "redis://127.0.0.1:1")
    assert shown.returncode == 1
    summary = json.loads(shown.stdout)
    assert (summary["run_id"], summary["outcome"]) == ("x", "failed")
    assert summary["error"].startswith("ServerUnreachable: ")
    assert shown.stderr.startswith("error: ")


def test_the_command_to_go_on_with_names_the_run_and_no_password(monkeypatch):
    monkeypatch.setenv("TRINITY_HOME", "/my home")
    given = [
        "demo",
        "--run",
        "a",
        "--redis-url=redis://u:secret@h",
        "--weights-redis-url",
        "redis://:p@h",
    ]
    assert resume_command(given, "a") == (
        "TRINITY_HOME='/my home' trinity-events demo --run a "
        "'--redis-url=redis://u:***@h' --weights-redis-url 'redis://:***@h'"
    )
    assert resume_command(["trainer", "--run=a-9", "--fresh"], "a-9").endswith("trainer --run=a-9")
    assert resume_command(["demo"], "demo-7").endswith("trinity-events demo --run demo-7")
