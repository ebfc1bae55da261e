"""`evaluate` measures a checkpoint as its training did, and the best one outlives kills."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")

from tests.support.damage import flip
from tests.support.run_processes import small_run
from tests.support.saved_checkpoints import ready_checkpoints
from tests.support.sessions import kill_session
from tests.support.waits import PATIENCE, wait_until
from trinity_events.system.open_folder import partial_folder
from trinity_schemas import EvaluationFinished
from trinity_workers.launch.evaluate import TEMPORARY

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
    # The folder of another evaluation that lives, and one that a killed evaluation has left.
    abandoned = processes.folder / f".{TEMPORARY}.{'0' * 16}.part"
    with partial_folder(processes.folder / TEMPORARY) as living:
        abandoned.mkdir()
        done = run_command(processes, *words)
        assert [*processes.folder.glob(f".{TEMPORARY}.*")] == [living]
    assert done.returncode == 1, done.stderr
    evaluation = json.loads(done.stdout)
    assert "sets" in evaluation, evaluation
    finished, failed = evaluation["sets"]
    assert (finished["name"], finished["answers"], finished["error"]) == ("said", 16, None)
    metrics = finished["metrics"]
    assert metrics["mean_low"] < metrics["mean"] < metrics["mean_high"]
    assert failed["metrics"] == {} and "no such question" in failed["error"]
    assert evaluation["checkpoint"] == str(policy_folder)


@pytest.mark.nightly(
    "end_to_end/test_evaluate.py::test_a_model_is_evaluated_on_the_sets_that_are_named"
)
def test_the_best_checkpoint_outlives_a_kill_and_is_that_of_the_evaluated_step(
    processes, config, tmp_path
):
    best = ("checkpoints.keep_best.set=said", "checkpoints.keep=1", "checkpoints.interval=2")
    settings = [word for setting in best for word in ("--set", setting)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    gentle = ("--set", "trainer.learning_rate=1e-6", "--set", "steps=1000")
    run = processes.start("train", str(config), *settings, *gentle, **quiet)

    def evaluations() -> dict[int, EvaluationFinished]:
        events = [entry.event for entry in processes.log()]
        return {
            event.version.step: event for event in events if isinstance(event, EvaluationFinished)
        }

    def saved() -> set[int]:
        ready = ready_checkpoints(processes.redis_url, processes.run_id)
        return {event.step for event in ready}

    wait_until(lambda: evaluations().keys() & saved(), patience=6 * PATIENCE)
    kill_session(run.pid)
    run.wait(PATIENCE)
    reached = max(saved())
    # From here on the policy is destroyed, and retention would remove what came before.
    harsh = ("--set", "trainer.learning_rate=1.0", "--set", f"steps={reached + 4}")
    resumed = processes.start("train", str(config), *settings, *harsh)
    _, error = resumed.communicate(timeout=9 * PATIENCE)
    assert resumed.returncode == 0, error
    results = evaluations()
    step = max(results, key=lambda step: results[step].metrics["mean"])
    assert step <= reached
    folder = processes.folder / processes.run_id
    steps = {int(path.name.removeprefix("global_step_")) for path in folder.glob("global_step_*")}
    assert steps == {step, reached + 4}

    target = tmp_path / "converted"
    done = run_command(processes, "convert", "--best", processes.run_id, str(target))
    assert done.returncode == 0, done.stderr
    before = len(processes.log())
    evaluated = [
        run_command(
            processes,
            *("evaluate", str(config), "--checkpoint", name, *best, "--set", "said", "--json"),
        )
        for name, *best in ((processes.run_id, "--best"), (str(target),))
    ]
    for done in evaluated:
        assert done.returncode == 0, done.stderr
        [finished] = json.loads(done.stdout)["sets"]
        assert finished["metrics"] == results[step].metrics
        assert finished["answers"] == results[step].answers
    assert len(processes.log()) == before, "nothing of the training run is changed"

    damaged = folder / f"global_step_{step}" / "actor" / "model_world_size_1_rank_0.pt"
    flip(damaged)
    name = f"{processes.run_id}/{step}"
    done = run_command(processes, "evaluate", str(config), "--checkpoint", name)
    assert done.returncode == 1
    [sentence] = done.stderr.splitlines()
    assert sentence.startswith(f"error: the checkpoint of step {step} is damaged: {damaged}")
