"""vLLM in the processes of a trainer's ranks: whole runs, and sleep on a double."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.errors import raises
from tests.support.pipeline import events_of
from tests.support.rollout_engines import requests_for
from trinity_events.errors import NotAsPublished
from trinity_schemas import StepRef, StepTrained, VersionOpened
from trinity_workers.rollout_engines import EngineOptions, NotServing
from trinity_workers.rollout_engines.proof import ProofOptions

pytestmark = [pytest.mark.processes, pytest.mark.heavy]

REWARDS = """
def vowels(question, answer):
    return sum(letter in "aeiou" for letter in answer.text) / 12
"""
RUN = """
name: hybrid
steps: 3
model: {path: %s}
task: {name: spell-backward}
rewards: {function: ./rewards.py:vowels}
trainer: {ranks: 2, learning_rate: 1.0e-2, warmup_steps: 0, colocated: true}
rollouts: {prompts_per_step: 4, samples_per_prompt: 2, max_new_tokens: 12}
explorer: {engine: vllm, engine_options: {engine_args: {kv_cache_memory_bytes: 134217728}}}
sync: {max_staleness: 0}
checkpoints: {interval: 0}
"""
LAYOUTS = {
    "fsdp": (),
    "megatron": ("trainer.engine=megatron", "trainer.tensor_parallel=2"),
    "megatron, resharded": (
        "trainer.engine=megatron",
        "trainer.tensor_parallel=2",
        "trainer.rollout_tensor_parallel=1",
    ),
}


@pytest.fixture(scope="module")
def divisible_folder(tmp_path_factory):
    """A policy whose heads two ranks can share."""
    from tests.support.vllm_policies import create_vllm_policy

    return create_vllm_policy(tmp_path_factory.mktemp("divisible"), kv_heads=2)


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout",
    [
        "fsdp",
        pytest.param("megatron", marks=pytest.mark.nightly),
        pytest.param("megatron, resharded", marks=pytest.mark.nightly),
    ],
)
async def test_ranks_train_on_what_their_vllm_generates_with_the_weights_of_each_step(
    cli, log, redis_url, tmp_path, divisible_folder, layout
):
    file = tmp_path / "run.yaml"
    file.write_text(RUN % divisible_folder)
    (tmp_path / "rewards.py").write_text(REWARDS)
    words = [word for setting in LAYOUTS[layout] for word in ("--set", setting)]
    place = ("--run", log.run_id, "--redis-url", redis_url, "--checkpoint-root", str(tmp_path))
    result = cli("train", str(file), *words, *place, "--json", timeout=800)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["transport"] == "none"
    steps = [entry.event for entry in await events_of(log, StepTrained)]
    assert [step.staleness for step in steps] == [{0: 8}] * 3
    for step in steps:
        # The trainer computes the log-probabilities again, with the weights that it holds; a step
        # of these changes them by far more.
        assert step.metrics["gradient_norm"] > 0.01
        assert step.metrics["approx_kl"] < 1e-6
    assert not await events_of(log, VersionOpened), "no weights travel"


class DoubleLLM:
    """vLLM on a platform that sleeps: it records the calls, and what its model was given."""

    def __init__(self, model):
        self.calls, self.omitted = [], set()
        worker = SimpleNamespace(
            weight_transfer_engine=self,
            vllm_config=None,
            model_config=SimpleNamespace(dtype=torch.float32, is_moe=False),
            get_model=lambda: model,
        )
        executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
        self.llm_engine = SimpleNamespace(model_executor=executor)
        self.model_config = SimpleNamespace(max_model_len=64)

    def wake_up(self, tags):
        self.calls.append(f"wake {tags[0]}")

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def reload(self, tensors):
        self.calls.append("load")
        return {name for name, _ in tensors} - self.omitted

    def generate(self, prompts, params, use_tqdm):
        self.calls.append("generate")
        return [SimpleNamespace(outputs=[answer(each.max_tokens)]) for each in params]


def answer(count):
    return SimpleNamespace(
        token_ids=[9] * count, logprobs=[{9: SimpleNamespace(logprob=-1.0)}] * count
    )


@contextmanager
def no_config(_):
    yield


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def double(vllm_folder, monkeypatch, group):
    import vllm.config

    from trinity_workers.rollout_engines.vllm import colocated

    model = torch.nn.Linear(2, 2)
    llm = DoubleLLM(model)
    monkeypatch.setattr(colocated, "_start", lambda options, tensor_parallel: (llm, True))
    monkeypatch.setattr(vllm.config, "set_current_vllm_config", no_config)
    options = EngineOptions(model_folder=vllm_folder, proof=ProofOptions(checks="names"))
    gathered = list(model.named_parameters())
    engine = colocated.ColocatedVLLM(options, lambda: gathered)
    return SimpleNamespace(llm=llm, engine=engine, gathered=gathered)


VERSION = StepRef(1, 3)


def test_weights_are_there_for_a_generation_alone(double):
    with double.engine.serving(VERSION):
        generations = double.engine.generate_here(requests_for([0, 1], samples=2, tokens=5))
    assert [each.versions for each in generations] == [[(VERSION, 5)]] * 4
    assert double.llm.calls == [
        "sleep 2",
        "wake weights",
        "load",
        "wake kv_cache",
        "generate",
        "sleep 2",
    ]
    with pytest.raises(NotServing):
        double.engine.generate_here(requests_for([0], samples=1))


@pytest.mark.parametrize("fault", ["not loaded", "not given"])
def test_nothing_is_generated_with_weights_that_were_not_loaded_whole(double, fault):
    if fault == "not loaded":
        double.llm.omitted.add("bias")
    else:
        double.gathered.append(double.gathered[1])
    serving = double.engine.serving(VERSION)
    with raises(NotAsPublished, step=3, fault=fault, tensors=("bias",)), serving:
        pass
    assert double.engine.serves is None
    assert "generate" not in double.llm.calls


def test_generation_leaves_the_random_states_of_training(double, monkeypatch):
    def generate(prompts, params, use_tqdm):
        torch.rand(3)
        return [SimpleNamespace(outputs=[answer(each.max_tokens)]) for each in params]

    monkeypatch.setattr(double.llm, "generate", generate)
    before = torch.get_rng_state()
    with double.engine.serving(VERSION):
        double.engine.generate_here(requests_for([0], samples=1))
    assert bool((torch.get_rng_state() == before).all())
