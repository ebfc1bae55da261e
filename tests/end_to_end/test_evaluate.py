"""`evaluate` measures a checkpoint as its training did, and the best one outlives kills."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.support.run_processes import small_run
from tests.support.waits import PATIENCE

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.timeout(900)]

REWARD = """
def reward(question, answer):
    if question.prompt == "9":
        raise ValueError("no such question")
    # A policy that is destroyed repeats itself.
    return len(set(answer.text)) / 16
"""
QUESTIONS = [{"prompt": f"{number} {number + 1}", "answer": ""} for number in range(6)]
BROKEN = [{"prompt": "9", "answer": ""}]


@pytest.fixture
def config(tmp_path, policy_folder):
    (tmp_path / "reward.py").write_text(REWARD)
    for name, questions in (("said", QUESTIONS), ("broken", BROKEN)):
        lines = [json.dumps(question) + "\n" for question in questions]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return small_run(
        *(tmp_path, policy_folder),
        rewards={"function": "./reward.py:reward"},
        rollouts={"prompts_per_step": 2, "samples_per_prompt": 2},
        explorer={"count": 1, "deterministic": True},
        evaluation={
            "sets": {
                "said": {"questions": "./said.jsonl", "interval": 2, "at_start": False},
                "broken": {"questions": "./broken.jsonl", "samples": 1, "at_start": False},
            }
        },
    )


def run_command(processes, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trinity_events", *words]
    place = ("--checkpoint-root", str(processes.folder))
    return subprocess.run(
        [*command, *place],
        env=processes.env,
        capture_output=True,
        text=True,
        timeout=6 * PATIENCE,
        check=False,
    )


def test_a_model_is_evaluated_on_the_sets_that_are_named(processes, config, policy_folder):
    """Also of one that fails, which decides the exit code."""
    chosen = ("--set", "said", "--set", "broken", "--set", "evaluation.sets.said.count=4")
    words = ("evaluate", str(config), "--checkpoint", str(policy_folder), *chosen, "--json")
    done = run_command(processes, *words)
    assert done.returncode == 1, done.stderr
    evaluation = json.loads(done.stdout)
    assert "sets" in evaluation, evaluation
    finished, failed = evaluation["sets"]
    assert (finished["name"], finished["answers"], finished["error"]) == ("said", 16, None)
    metrics = finished["metrics"]
    assert metrics["mean_low"] < metrics["mean"] < metrics["mean_high"]
    assert failed["metrics"] == {} and "no such question" in failed["error"]
    assert evaluation["checkpoint"] == str(policy_folder)
    assert [*processes.folder.glob(".evaluate-*")] == []
