"""A run with a constant reward raises its alarm and continues; a notice of its end loses no step.

The job is about to be killed: it saves its last step, and a resume trains none again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.support.run_processes import small_run

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.timeout(600)]

PATIENCE = 300.0
TRAINED = 7
"""Steps before the notice: the alarm is raised at the fifth."""
REWARD = "def reward(question, answer):\n    return 0.5\n"
SENTENCE = "100% of the groups have equal rewards"


@pytest.fixture(scope="module")
def noticed(tmp_path_factory, policy_folder, cli):
    """A run that was sent a notice: its end, its messages, its events and its state."""
    folder = tmp_path_factory.mktemp("warned")
    home = folder / "h"
    home.mkdir()
    (folder / "reward.py").write_text(REWARD)
    messages = folder / "messages"
    # No Python: a message about an interrupted run has three seconds, also on a loaded host.
    notify = {"command": ["sh", "-c", 'cat >> "$0"; echo >> "$0"', str(messages)]}
    file = small_run(
        *(folder, policy_folder),
        name="warned",
        steps=400,
        trainer={"ranks": 2},
        rewards={"function": "./reward.py:reward"},
        rollouts={"prompts_per_step": 2, "samples_per_prompt": 2},
        checkpoints={"interval": 390},
        notify=notify,
    )

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return cli(*arguments, env={"TRINITY_HOME": str(home)})

    def read(*arguments: str) -> str:
        shown = command(*arguments)
        assert shown.returncode == 0, shown.stderr
        return shown.stdout

    def read_status() -> dict[str, Any]:
        # Before the run is opened there is none to ask for.
        shown = command("status", "warned", "--json")
        return msgspec.json.decode(shown.stdout) if shown.returncode == 0 else {}

    train = [sys.executable, "-m", "trinity_events", "train", str(file), "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"TRINITY_HOME": str(home)}
    with subprocess.Popen(train, cwd=home, env=environment, **pipes) as run:
        began = time.monotonic()
        while (read_status().get("ledger") or {}).get("trained", 0) < 2 * TRAINED:
            assert run.poll() is None, run.communicate()[1][-4000:]
            assert time.monotonic() - began < PATIENCE
            time.sleep(0.2)  # the cores are the run's
        run.send_signal(signal.SIGUSR2)
        output, errors = run.communicate(timeout=PATIENCE)
    tail = read("tail", "warned", "-n", "100000", "--json").splitlines()
    return SimpleNamespace(
        returncode=run.returncode,
        output=output + errors,
        messages=[msgspec.json.decode(line) for line in messages.read_bytes().splitlines() if line],
        events=[msgspec.json.decode(line) for line in tail],
        state=read_status(),
        status=read("status", "warned"),
        read=read,
        resume=lambda *settings: subprocess.run(
            [*train, *settings], cwd=home, env=environment, check=False, **pipes
        ),
    )


def events_of(noticed, kind: str) -> list[dict[str, Any]]:
    return [line["event"] for line in noticed.events if line["event"]["type"] == kind]


def test_a_constant_reward_raises_its_alarm_and_the_run_continues(noticed):
    assert f"alarm: {SENTENCE}" in noticed.output
    alarms = {event["alarm"]: event for event in events_of(noticed, "alarm-raised")}
    alarm = alarms["equal_rewards"]
    assert (alarm["step"], alarm["value"], alarm["threshold"]) == (5, 1.0, 0.98)
    shares = [
        event["metrics"]["rollout/equal_rewards"] for event in events_of(noticed, "step-trained")
    ]
    assert len(shares) >= TRAINED
    assert set(shares) == {1.0}
    sent = [message for message in noticed.messages if message["event"] == "alarm"]
    assert len(sent) == len(alarms)
    assert f"run warned: {alarm['sentence']}" in [message["sentence"] for message in sent]
    assert "Alarm equal_rewards: 100%" in " ".join(noticed.status.split())


def test_a_notice_saves_the_last_step_and_the_messages_say_so(noticed):
    assert noticed.returncode == 128 + signal.SIGUSR2, noticed.output[-4000:]
    sentence = noticed.state["closed_error"]
    assert noticed.state["closed"] == "interrupted"
    assert sentence.startswith("SIGUSR2 announced the end: the checkpoint of step ")
    assert "no step is lost" in sentence
    step = noticed.state["ready"]["checkpoint"]["at"]["step"]
    assert f"of step {step} was complete" in sentence
    message = noticed.messages[-1]
    assert (message["event"], message["run"]) == ("interrupted", "warned")
    assert sentence in message["sentence"] and "train" in message["command"]
    # The trainer sent a last report of its seconds on that way out.
    reports = [line for line in noticed.events if line["event"]["type"] == "phases-measured"]
    last = {line["producer"]["role"]: line["event"] for line in reports}
    assert last["trainer"]["is_last"]
    settings = (f"steps={step + 1}", "checkpoints.interval=100")
    resumed = noticed.resume(*(word for setting in settings for word in ("--set", setting)))
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert f"resumes from the checkpoint of step {step}" in resumed.stderr + resumed.stdout
    books = msgspec.json.decode(noticed.read("audit", "warned", "--json"))
    assert books["balanced"]
