"""All mistakes that can be found without training are found at once, and before a run starts."""

import json
import shutil
import sys
from collections import namedtuple

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.errors import raises
from trinity_events.errors import PackageMissing
from trinity_events.system import disk_space
from trinity_workers.config.files import read_config
from trinity_workers.engines.fsdp_tensor import TensorParallelRefused
from trinity_workers.launch import run_check
from trinity_workers.launch.run_check import ExpertsNotTaken, NotEnoughSpace, find_mistakes
from trinity_workers.rollout_engines.loading import SamplingNotSupported

pytestmark = pytest.mark.processes  # those of the user's reward function

QUESTIONS = '{"prompt": "a", "answer": "b"}\n' * 40
ENOUGH = 1 << 40
PLANTED = {
    "model": {"path": "no-model"},
    "task": {"questions": "no-questions.jsonl"},
    "rewards": {"function": "rewards.py:no_such"},
    "tracking": {"trackers": ["no_such_tracker"]},
    "evaluation": {"sets": {"held": {"questions": "not-json.jsonl"}}},
    "no_such_section": 1,
}
NAMED = (
    *("no_such_section", "no policy in", "no-questions.jsonl", "not-json.jsonl"),
    *("no_such'", "no_such_tracker"),
)


@pytest.fixture
def planted(tmp_path):
    (tmp_path / "rewards.py").write_text("def reward(question, answer):\n    return 1.0\n")
    (tmp_path / "not-json.jsonl").write_text("{]\n")
    file = tmp_path / "planted.yaml"
    file.write_text(json.dumps(PLANTED))  # JSON is YAML
    return file


def test_check_reports_all_mistakes_of_a_file_each_in_a_sentence(cli, planted):
    result = cli("train", str(planted), "--check")
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert len(lines) == len(NAMED), result.stderr
    for name in NAMED:
        assert any(name in line for line in lines), (name, result.stderr)
    assert all(line.startswith("error: ") for line in lines)


def test_check_reports_folder_and_servers_in_addition_to_the_mistakes_of_the_file(cli, planted):
    (no_folder := planted.parent / "file").write_text("")
    servers = ("--redis-url", "redis://127.0.0.1:1", "--weights-redis-url", "redis://127.0.0.1:2")
    result = cli("train", str(planted), "--check", "--checkpoint-root", str(no_folder), *servers)
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert len(lines) == len(NAMED) + 3, result.stderr
    for name in (*NAMED, str(no_folder), "127.0.0.1:1", "127.0.0.1:2"):
        assert any(name in line for line in lines), (name, result.stderr)


def test_train_reports_the_same_before_it_opens_the_run(cli, planted, redis_url, run_id):
    del (right := dict(PLANTED))["no_such_section"]
    planted.write_text(json.dumps(right))
    place = ("--run", run_id, "--redis-url", redis_url)
    result = cli("train", str(planted), *place, "--checkpoint-root", str(planted.parent))
    assert result.returncode == 1
    for name in NAMED[1:]:
        assert name in result.stderr, name
    assert result.stderr.count("error: ") == len(NAMED) - 1
    assert not (planted.parent / run_id).exists()


def test_the_built_in_policy_has_prompts_that_fit(cli, tmp_path):
    file = tmp_path / "short.yaml"
    file.write_text("rollouts: {max_prompt_tokens: 2}")
    result = cli("train", str(file), "--check")
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert "rollouts.max_prompt_tokens: 2" in line


def test_missing_gpus_are_reported_once(cli, tmp_path, policy_folder):
    file = tmp_path / "gpus.yaml"
    model = f"model: {{dtype: bfloat16, path: {policy_folder}}}"
    file.write_text(f"trainer: {{engine: verl-megatron, ranks: 99}}\n{model}")
    result = cli("train", str(file), "--check")
    assert result.returncode == 1
    assert sum("GPU" in line for line in result.stderr.splitlines()) == 1, result.stderr


@pytest.fixture
def whole(tmp_path, policy_folder):
    """Make the configuration of a run in which nothing is wrong but what a test adds."""
    (tmp_path / "rewards.py").write_text("def reward(question, answer):\n    return 1.0\n")
    (tmp_path / "questions.jsonl").write_text(QUESTIONS)

    def make(**sections):
        content = {
            "model": {"path": str(policy_folder)},
            "task": {"questions": "questions.jsonl"},
            "rewards": {"function": "rewards.py:reward"},
            "evaluation": {"sets": {}},
        }
        (tmp_path / "run.yaml").write_text(json.dumps(content | sections))
        return read_config(tmp_path / "run.yaml").checked()

    return make


async def test_nothing_is_wrong_with_a_whole_run(whole, tmp_path):
    checked = find_mistakes(whole(), tmp_path, alone=True, ray_address=None, thorough=True)
    assert await checked == []


async def test_a_model_whose_layers_ranks_cannot_share_is_refused_before_they_load_it(
    whole, tmp_path
):
    config = whole(trainer={"ranks": 4, "tensor_parallel": 4})
    [mistake] = await find_mistakes(config, tmp_path, alone=True, ray_address=None, thorough=True)
    with raises(TensorParallelRefused, fault="parts", what="key-value heads", count=2, ranks=4):
        raise mistake


async def test_every_set_of_questions_is_checked(whole, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    sets = {
        "whole": {"questions": "questions.jsonl"},
        "empty": {"questions": "empty.jsonl"},
        "absent": {"questions": "absent.jsonl"},
    }
    config = whole(task={"sets": sets})
    mistakes = await find_mistakes(config, tmp_path, alone=True, ray_address=None)
    empty, absent = map(str, mistakes)
    assert "task.sets.empty: " in empty and "no file of questions" in absent
    del sets["empty"], sets["absent"]
    assert (
        await find_mistakes(whole(task={"sets": sets}), tmp_path, alone=True, ray_address=None)
        == []
    )


async def test_every_source_of_questions_is_read_once(whole, tmp_path):
    (tmp_path / "counted.py").write_text(
        "from pathlib import Path\n"
        "def read(name):\n"
        "    with (Path(__file__).parent / 'reads').open('a') as file:\n"
        "        file.write(f'{name}\\n')\n"
        "    return [{'prompt': f'{name} {n}', 'answer': 'b'} for n in range(40)]\n"
        "def trained():\n"
        "    return read('trained')\n"
        "def held():\n"
        "    return read('held')\n"
    )
    config = whole(
        task={"sets": {"a": {"questions": "counted.py:trained"}}},
        evaluation={"sets": {"held": {"questions": "counted.py:held"}, "tenth": {}}},
    )
    assert await find_mistakes(config, tmp_path, alone=True, ray_address=None) == []
    assert (tmp_path / "reads").read_text().split() == ["trained", "held"]


async def test_a_reward_function_of_another_signature_is_named(whole, tmp_path):
    (tmp_path / "other.py").write_text("def reward(answer):\n    return 1.0\n")
    config = whole(rewards={"function": "other.py:reward"})
    [mistake] = await find_mistakes(config, tmp_path, alone=True, ray_address=None)
    assert "other.py" in str(mistake)


async def test_an_engine_that_is_not_installed_and_a_setting_that_it_lacks_are_named(
    whole, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "vllm", None)
    config = whole(explorer={"engine": "vllm"})
    [missing] = await find_mistakes(config, tmp_path, alone=True, ray_address=None)
    assert (type(missing), missing.package) == (PackageMissing, "vllm")
    assert await find_mistakes(config, tmp_path, alone=False, ray_address=None) == []
    server = {"engine": "vllm-server", "engine_options": {"url": "http://127.0.0.1:8000"}}
    config = whole(explorer=server, rollouts={"stop": ["."], "top_p": 0.9})
    [lacking] = await find_mistakes(config, tmp_path, alone=True, ray_address=None)
    assert (type(lacking), lacking.settings) == (SamplingNotSupported, ("stop",))


async def test_too_little_space_on_disk_and_in_shared_memory_is_named_with_both_sizes(
    whole, tmp_path, monkeypatch
):
    usage = namedtuple("usage", ("total", "used", "free"))
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: usage(ENOUGH, ENOUGH, 1000))
    monkeypatch.setattr(run_check, "free_bytes", lambda: 1001)
    config = whole(sync={"transport": "shm"})
    memory, disk = await find_mistakes(config, tmp_path, alone=True, ray_address=None)
    assert isinstance(memory, NotEnoughSpace)
    assert isinstance(disk, NotEnoughSpace)
    assert (memory.free, disk.free) == (1001, 1000)
    assert disk.needed == 12 * 129_728
    assert memory.needed == 2 * 4 * 129_728


async def test_a_damaged_file_of_the_model_is_named_without_torch(whole, tmp_path, policy_folder):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in policy_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    config = whole(model={"path": str(folder)})
    [mistake] = await find_mistakes(config, tmp_path, alone=True, ray_address=None)
    assert str(folder) in str(mistake)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("colocated", [False, True])
async def test_experts_of_megatron_are_for_explorers_that_take_them_one_by_one(
    policy_folder, tmp_path, model_type, colocated
):
    folder = tmp_path / "policy"
    shutil.copytree(policy_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    trainer = {"engine": "megatron", "ranks": 1, "colocated": colocated}
    file = tmp_path / "run.yaml"
    sections = {"model": {"path": str(folder)}, "trainer": trainer, "sync": {"max_staleness": 0}}
    file.write_text(json.dumps(sections))
    mistakes = await find_mistakes(read_config(file).checked(), None, alone=True, ray_address=None)
    refusals = [mistake for mistake in mistakes if isinstance(mistake, ExpertsNotTaken)]
    assert [refusal.model_type for refusal in refusals] == ([] if colocated else [model_type])
