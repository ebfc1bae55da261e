"""A job that is about to be killed saves its last step, and a resume trains none again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.timeout(600)]

PATIENCE = 300.0
SETTINGS = {
    "name": "warned",
    "steps": 400,
    "model": {},
    "rollouts": {"prompts_per_step": 2, "samples_per_prompt": 2},
    "evaluation": {"sets": {}},
    "checkpoints": {"interval": 390},
}


def command(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trinity_events", *arguments],
        env=os.environ | {"TRINITY_HOME": str(home)},
        check=True,
        capture_output=True,
        text=True,
    )


def status(home: Path) -> dict:
    return msgspec.json.decode(command(home, "status", "warned", "--json").stdout)


def test_a_notice_saves_the_last_step_and_the_messages_say_so(tmp_path):
    home = tmp_path / "h"
    home.mkdir()
    got = tmp_path / "got.json"
    # No Python: a message about an interrupted run has three seconds, also on a loaded host.
    notify = {"command": ["sh", "-c", 'cat > "$0"', str(got)]}
    file = tmp_path / "run.yaml"
    file.write_text(msgspec.json.encode(SETTINGS | {"notify": notify}).decode())
    train = [sys.executable, "-m", "trinity_events", "train", str(file), "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"TRINITY_HOME": str(home)}
    with subprocess.Popen(train, cwd=home, env=environment, **pipes) as run:
        began = time.monotonic()
        while True:
            assert run.poll() is None, run.communicate()[1][-4000:]
            assert time.monotonic() - began < PATIENCE
            # Before the run is opened there is none to ask for.
            shown = subprocess.run(
                [sys.executable, "-m", "trinity_events", "status", "warned", "--json"],
                env=environment,
                capture_output=True,
                check=False,
            )
            if shown.returncode == 0:
                state = msgspec.json.decode(shown.stdout)
                if (state.get("ledger") or {}).get("trained", 0) >= 2:
                    break
        run.send_signal(signal.SIGUSR2)
        _, errors = run.communicate(timeout=PATIENCE)
    assert run.returncode == 128 + signal.SIGUSR2, errors[-4000:]
    state = status(home)
    sentence = state["closed_error"]
    assert state["closed"] == "interrupted"
    assert sentence.startswith("SIGUSR2 announced the end: the checkpoint of step ")
    assert "no step is lost" in sentence
    step = state["ready"]["checkpoint"]["at"]["step"]
    assert f"of step {step} was complete" in sentence
    message = msgspec.json.decode(got.read_bytes())
    assert (message["event"], message["run"]) == ("interrupted", "warned")
    assert sentence in message["sentence"] and "train" in message["command"]
    # The trainer sent a last report of its seconds on that way out.
    tail = command(home, "tail", "warned", "-n", "100000", "--json").stdout.splitlines()
    lines = [msgspec.json.decode(line) for line in tail]
    reports = [line for line in lines if line["event"]["type"] == "phases-measured"]
    last = {line["producer"]["role"]: line["event"] for line in reports}
    assert last["trainer"]["is_last"]
    more = [*train, "--set", f"steps={step + 1}", "--set", "checkpoints.interval=100"]
    resumed = subprocess.run(
        more, cwd=home, env=environment, check=False, capture_output=True, text=True
    )
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert f"resumes from the checkpoint of step {step}" in resumed.stderr + resumed.stdout
    books = msgspec.json.decode(command(home, "audit", "warned", "--json").stdout)
    assert books["balanced"]
