"""Models and layouts beside the session's: what vLLM computes with, and what the proof says of it.

Each opens an engine, installs a version, and compares log-probabilities with the published model.
"""

import pytest
import torch

from tests.support.pipeline import events_of, reports_accepted
from tests.support.rollout_engines import logprobs_of, requests_for
from tests.support.vllm_policies import create_vllm_policy
from tests.vllm.conftest import ENGINE_ARGS, open_vllm_run
from trinity_events.errors import IncompatibleWeights, NotAsPublished
from trinity_schemas import WeightsApplied
from trinity_workers.engines.model_folder import FolderReader
from trinity_workers.learning.lora_settings import LoraConfig
from trinity_workers.rollout_engines.proof import ProofOptions
from trinity_workers.rollout_engines.vllm.reports import ExpertsNotUpdated

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.processes, pytest.mark.heavy]

O_PROJ = "model.layers.0.self_attn.o_proj.weight"
TWO_RANKS = {**ENGINE_ARGS, "tensor_parallel_size": 2}
CASES = {
    "untied": ({"tied": False}, {}),
    "two ranks": ({"kv_heads": 2}, {"args": TWO_RANKS}),
    "two ranks with one key-value head": ({}, {"args": TWO_RANKS}),
    "bfloat16": ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
    "adapters": ({}, {"lora": LoraConfig(rank=4), "proof": ProofOptions(checks="all")}),
}
NATS = {"bfloat16": 0.1}
"""Largest difference of a log-probability, where it is not that of float32."""


@pytest.mark.parametrize("name", CASES)
async def test_it_computes_with_the_version_and_says_what_it_proved(
    name, redis_url, weights_url, tmp_path
):
    policy, options = CASES[name]
    folder = create_vllm_policy(tmp_path / "policy", **policy)
    async with open_vllm_run(redis_url, weights_url, folder, tmp_path, **options) as run:
        announced = await run.install_next()
        requests = requests_for(range(6), samples=2, tokens=10)
        for request, generation in zip(requests, await run.engine.generate(requests), strict=True):
            reference = logprobs_of(run.model, request, generation.tokens)
            nats = NATS.get(name, 3e-5)
            assert generation.logprobs == pytest.approx(reference, abs=nats)
        run.engine._synchronizer.flush()
        await reports_accepted(run.log)
        applied = [entry.event for entry in await events_of(run.log, WeightsApplied)][-1]
        assert applied.digest == announced.version_digest
        proof = applied.proof
        assert (proof.status, proof.unproven) == ("proven", ())
        assert proof.probes == (4 if name == "adapters" else 0)
        assert proof.tensors == len(FolderReader(folder).names())
        await run.plant(f"flip:{O_PROJ}:last")
        with pytest.raises(NotAsPublished) as raised:
            await run.install_next()
        assert (raised.value.fault, raised.value.tensors) == ("not served", (O_PROJ,))


@pytest.mark.parametrize("architecture", ["qwen2-moe", "qwen3-moe"])
async def test_experts_that_a_cpu_does_not_update_are_refused(
    architecture, redis_url, weights_url, tmp_path
):
    folder = create_vllm_policy(tmp_path / "policy", architecture=architecture)
    with pytest.raises(IncompatibleWeights) as raised:
        async with open_vllm_run(redis_url, weights_url, folder, tmp_path):
            raise AssertionError("it serves a version")
    assert raised.value.reason == str(ExpertsNotUpdated())
