"""Faults in the way of the weights into vLLM: each is seen before a token is sampled by it."""

import pytest

from tests.support.pipeline import events_of, reports_accepted
from tests.support.rollout_engines import logprobs_of, requests_for
from trinity_events.errors import NotAsPublished
from trinity_schemas import VersionRefused
from trinity_workers.rollout_engines import NotServing

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.processes, pytest.mark.heavy]

ATTENTION = "model.layers.{}.self_attn.{}"
O_PROJ = ATTENTION.format(0, "o_proj.weight")
EMBEDDING = "model.embed_tokens.weight"
NORMS = tuple(f"model.layers.0.{name}_layernorm.weight" for name in ("input", "post_attention"))
QUERIES = tuple(ATTENTION.format(layer, "q_proj.weight") for layer in (0, 1))
GATE_AND_UP = tuple(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))

FAULTS = {
    "nothing is transferred, and every call answers well": ("no-transfer", "another version", ()),
    "the last tensor does not come": ("truncate:1", "not given", None),
    "a layer does not come": ("truncate:13", "not given", None),
    "the transport breaks": ("break:10", "load", ()),
    "a norm is left out": ("omit:model.norm.weight", "not given", None),
    "a bias is left out": (f"omit:{ATTENTION.format(0, 'q_proj.bias')}", "not given", None),
    "a part of a packed layer is left out": (
        f"omit:{ATTENTION.format(1, 'k_proj.weight')}",
        "not given",
        None,
    ),
    "a layer's weight is left out": ("omit:model.layers.1.mlp.down_proj.weight", "not given", None),
    "the embedding is left out": (f"omit:{EMBEDDING}", "not given", None),
    # vLLM's own reload refuses it, as each layer is finished by its last element.
    "a tensor comes twice": (f"twice:{O_PROJ}", "load", ()),
    "queries of two layers are swapped": ("swap:" + ",".join(QUERIES), "not served", QUERIES),
    "gate and up are swapped": ("swap:" + ",".join(GATE_AND_UP), "not served", GATE_AND_UP),
    "two norms are swapped": ("swap:" + ",".join(NORMS), "not served", NORMS),
    "a sign is flipped": (f"flip:{O_PROJ}:sign", "not served", (O_PROJ,)),
    "an exponent is flipped": (f"flip:{O_PROJ}:exponent", "not served", (O_PROJ,)),
    "a mantissa is flipped": (f"flip:{O_PROJ}:mantissa", "not served", (O_PROJ,)),
    "the last bit is flipped": (f"flip:{O_PROJ}:last", "not served", (O_PROJ,)),
    "a bit of a norm is flipped": (f"flip:{NORMS[0]}:last", "not served", (NORMS[0],)),
    "a sign of the embedding is flipped": (f"flip:{EMBEDDING}:sign", "not served", None),
    "the tied output layer keeps old weights": ("stale-head", "not served", (EMBEDDING,)),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_is_seen_and_the_next_version_heals_it(vllm_run, name):
    fault, verdict, tensors = FAULTS[name]
    await vllm_run.plant(fault)
    announced = await vllm_run.publish()
    try:
        with pytest.raises(NotAsPublished) as raised:
            await vllm_run.engine.install(announced)
    finally:
        await vllm_run.plant(None)
    assert (raised.value.step, raised.value.fault) == (announced.step, verdict)
    if tensors is not None:
        assert sorted(raised.value.tensors) == sorted(tensors)
    assert vllm_run.engine.serves is None
    await vllm_run.engine.resume()  # vLLM itself would serve the half of a version then
    with pytest.raises(NotServing):
        await vllm_run.engine.generate(requests_for([0], samples=1))
    await vllm_run.install_next()
    [request] = requests_for([0], samples=1)
    [generation] = await vllm_run.engine.generate([request])
    reference = logprobs_of(vllm_run.model, request, generation.tokens)
    assert generation.logprobs == pytest.approx(reference, abs=1e-5)


async def test_a_refused_version_is_an_event_with_its_reason(vllm_run):
    await vllm_run.plant(f"flip:{O_PROJ}:last")
    announced = await vllm_run.publish()
    with pytest.raises(NotAsPublished) as raised:
        await vllm_run.engine.install(announced)
    await vllm_run.plant(None)
    vllm_run.engine._synchronizer.flush()
    await reports_accepted(vllm_run.log)
    refusals = [entry.event for entry in await events_of(vllm_run.log, VersionRefused)]
    assert refusals[-1].version.step == announced.step
    assert refusals[-1].reason == str(raised.value)
    await vllm_run.install_next()
