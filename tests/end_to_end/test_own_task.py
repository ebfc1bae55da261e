"""Claims about a run of a user's own model, questions and reward, with real processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("ray")

from tests.support.own_models import own_model

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_task"


@pytest.fixture
def run(folder, own_home, cli, run_id, monkeypatch):
    """Return a function that trains as a file among the user's says, from another folder."""
    monkeypatch.chdir(own_home)
    environment = {"TRINITY_HOME": str(own_home), "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}

    def train(settings: dict) -> subprocess.CompletedProcess[str]:
        # The run has the file's name. A run of that name that lives on this host would refuse it.
        file = folder / f"{run_id}.yaml"
        file.write_text(msgspec.json.encode(settings).decode())  # JSON is YAML
        return cli("train", str(file), "--json", timeout=500, env=environment)

    return train


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("questions.jsonl", "reward.py"):
        (tmp_path / name).write_bytes((EXAMPLE / name).read_bytes())
    own_model(tmp_path / "model", "qwen3")
    return tmp_path


def settings(rewards: dict | None = None, **task) -> dict:
    return {
        "steps": 3,
        "model": {"path": "./model"},
        "task": {"questions": "./questions.jsonl"} | task,
        "rewards": {"function": "./reward.py:reward"} | (rewards or {}),
        "trainer": {"ranks": 2},
        "algorithm": {"preset": "dr_grpo", "kl": {"coefficient": 0.01}},
        "rollouts": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8},
        "evaluation": {"sets": {"held-out": {"count": 4}}},
        "checkpoints": {"interval": 0},
    }


@pytest.fixture
def own_home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("h")


REWARD_OF_TURNS = """
def reward(question, answer):
    tools = sum(message["role"] == "tool" for message in answer.messages)
    return {"reward": tools + 10.0 * (question.set == "rare"), "score": float(tools)}
"""
ENVIRONMENT = """
class Tool:
    def reply(self, question, messages):
        return f"turn {len(messages)}"
"""
ENGINE = """
from trinity_workers.rollout_engines import updates_amid_turns
from trinity_workers.rollout_engines.huggingface import HuggingFaceEngine

@updates_amid_turns("keep")
def make(options):
    print("an engine of one's own", options.options, flush=True)
    return HuggingFaceEngine.open(options)
"""


def test_a_users_model_questions_reward_tools_and_engine_are_part_of_a_run(folder, run):
    (folder / "reward.py").write_text(REWARD_OF_TURNS)
    (folder / "tool.py").write_text(ENVIRONMENT)
    (folder / "engine.py").write_text(ENGINE)
    chosen = settings(environment="./tool.py:Tool")
    chosen["rollouts"] |= {"max_turns": 2, "max_new_tokens": 64, "pause_mode": "keep"}
    chosen["explorer"] = {"engine": "./engine.py:make", "engine_options": {"max_batch": 7}}
    chosen["steps"] = 2
    sets = {"plain": {"weight": 3.0}, "rare": {}}
    for name, of_set in sets.items():
        of_set["questions"] = f"./{name}.jsonl"
        (folder / f"{name}.jsonl").write_bytes((folder / "questions.jsonl").read_bytes())
    with (folder / "plain.jsonl").open("ab") as file:
        for number in range(60):
            prompt = [{"role": "user", "content": f"{number} {'long ' * 200}"}]
            file.write(msgspec.json.encode({"prompt": prompt, "answer": "4"}) + b"\n")
    chosen["rollouts"]["max_prompt_tokens"] = 200
    chosen["task"] |= {"questions": None, "sets": sets}
    chosen["tracking"] = {"trackers": ["jsonl"], "folder": "./tracked"}
    done = run(chosen)
    assert done.returncode == 0, done.stderr[-4000:]
    summary = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert (summary["outcome"], summary["warm_up_steps"]) == ("finished", 0)
    assert 0.0 < summary["score_first_third"] <= 1.0, "finished turns were answered by the tool"
    held_out = summary["evaluations"]["held-out"]
    assert (held_out["first_step"], held_out["last_step"]) == (0, 2)
    assert 0.0 <= held_out["first"]["mean"] <= 11.0
    [tracked] = (folder / "tracked").rglob("*.jsonl")
    lines = [msgspec.json.decode(line)["values"] for line in tracked.read_bytes().splitlines()]
    steps = [values for values in lines if "rollout/reward" in values]
    assert len(steps) == 2
    assert summary["log"]["dropped"].keys() == {"overlong"}
    for values in steps:
        prompts = [values[f"rollout/{name}/prompts"] for name in sets]
        assert sum(prompts) == 4.0 and min(prompts) >= 1.0
        assert values["rollout/plain/reward"] <= 1.0
        assert values["rollout/rare/reward"] >= 10.0


def test_a_reward_that_fails_ends_the_run_with_its_sentence_traceback_and_answer(
    folder, cli, own_home, run_id, run
):
    (folder / "reward.py").write_text("def reward(question, answer):\n    return 1 / 0\n")
    done = run(settings() | {"trainer": {"ranks": 1}, "evaluation": {"sets": {}}})
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr[-4000:]
    cause = "raised ZeroDivisionError: division by zero (reward.py, line 2)"
    assert cause in errors[0] and "for the answer '" in errors[0]
    [shown] = [at for at, line in enumerate(lines) if "a reward failed: explorer-" in line]
    assert cause in lines[shown]
    evidence = "\n".join(lines[shown:])
    for line in ("    ZeroDivisionError: division by zero", "  prompt:", "  response:"):
        assert line in evidence
    shown = cli("explain", run_id, env={"TRINITY_HOME": str(own_home)})
    assert shown.returncode == 0, shown.stderr
    explained = shown.stdout
    assert "A reward failed: explorer-" in explained
    for line in ("    ZeroDivisionError: division by zero", "  prompt:", "  response:"):
        assert line in explained


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"questions": "./question.jsonl"}, "there is no file of questions at"),
        pytest.param(
            {"prompt": "question"},
            "has no field 'question' for the prompt: it has prompt, answer",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"questions": None, "name": "./mine.py:Task", "rewards": {"function": None}},
            "there is no file",
            marks=pytest.mark.nightly,
        ),
        (
            {"rewards": {"function": "./reward.py:rewards"}},
            "has no 'rewards': did you mean 'reward'?",
        ),
        pytest.param(
            {"rewards": {"function": None}},
            "need a reward: name a function of (question, answer)",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            {"environment": "./tool.py:Tool"},
            "tool.py with the environment",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_mistake_is_told_before_the_run_is_opened(own_home, run_id, run, task, message):
    done = run(settings(**task))
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert message in done.stderr.splitlines()[-1]
    assert not list(own_home.glob(f"checkpoints/{run_id}/*"))
