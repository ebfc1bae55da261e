"""The engine of vLLM on a CPU: what it generates, versions amid turns, and its end."""

import dataclasses
import os
import signal
import time

import anyio
import pytest
import torch

from tests.support.errors import raises
from tests.support.experiences import FIRST
from tests.support.pipeline import events_of, reports_accepted
from tests.support.rollout_engines import in_thread, requests_for
from tests.vllm.conftest import open_engine
from trinity_events.errors import CorruptVersion
from trinity_events.server import open_client
from trinity_events.system.error_text import ungrouped
from trinity_schemas import StepRef, WeightsApplied, chunk_key
from trinity_workers.rollout_engines import EngineEnded
from trinity_workers.rollout_engines.sampling import NoisySampler
from trinity_workers.rollout_engines.vllm.options import VLLMUnusable, find_engine_arguments

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.processes, pytest.mark.heavy]


def ref(announced):
    return StepRef(announced.epoch, announced.step)


SAMPLINGS = {
    "policy": {},
    "temperature": {"temperature": 1.3},
    "top-k and top-p": {"temperature": 0.7, "top_k": 20, "top_p": 0.6},
    "min-p": {"min_p": 0.3},
    "repetition penalty": {"repetition_penalty": 1.5},
    "greedy": {"temperature": 0.0},
}


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_log_probabilities_are_those_of_the_sampled_distribution(vllm_run, name):
    requests = requests_for(range(6), samples=2, tokens=10, **SAMPLINGS[name])
    generations = await vllm_run.engine.generate(requests)
    for request, generation in zip(requests, generations, strict=True):
        reference = sampled_logprobs(vllm_run.model, request, generation.tokens)
        assert generation.logprobs == pytest.approx(reference, abs=2e-5)
        assert generation.versions == [(vllm_run.engine.serves, len(generation.tokens))]
        assert generation.finished == (generation.tokens[-1] in vllm_run.engine._end_tokens)


def sampled_logprobs(model, request, tokens):
    """Log-probabilities of tokens after a prompt, as the Hugging Face engine computes them."""
    everything = [*request.tokens, *tokens]
    with torch.no_grad():
        logits = model(torch.tensor([everything])).logits[0]
    logprobs = []
    for place, token in enumerate(tokens):
        history = everything[: len(request.tokens) + place]
        sampler = NoisySampler([0], [request.sampling], torch.device("cpu"), [history])
        scaled = sampler._penalise(logits[None, len(history) - 1].float())
        scaled = scaled / (request.sampling.temperature or 1.0)
        logprobs.append(float(sampler._truncate(scaled.log_softmax(-1))[0, token]))
    return logprobs


async def test_a_request_has_the_same_answer_again_and_samples_differ(vllm_run):
    requests = requests_for(range(2), samples=4, tokens=12)
    first, again = [await vllm_run.engine.generate(requests) for _ in range(2)]
    assert [each.tokens for each in first] == [each.tokens for each in again]
    assert len({tuple(each.tokens) for each in first}) > 4


async def test_a_stop_string_ends_a_turn_with_the_token_that_completes_it(vllm_run):
    engine = vllm_run.engine
    whole = await engine.generate(requests_for(range(4), samples=4, tokens=16))
    stop = text_of(engine, max((each.tokens for each in whole), key=len))[5:7]
    requests = requests_for(range(4), samples=4, tokens=16, stop=(stop,))
    ends = set()
    for before, stopped in zip(whole, await engine.generate(requests), strict=True):
        tokens, count = before.tokens, len(stopped.tokens)
        assert stopped.tokens == tokens[:count]
        assert stop not in text_of(engine, tokens[: count - 1])
        assert stopped.stop == (stop if stop in text_of(engine, tokens[:count]) else None)
        assert stopped.versions == [(engine.serves, count)]
        assert stopped.logprobs == pytest.approx(before.logprobs[:count], abs=1e-6)
        assert stopped.finished == (stopped.stop is not None or before.finished)
        assert stopped.stop is not None or count == len(tokens)
        ends.add(stopped.stop)
    assert ends == {stop, None}
    assert not engine._engine.output_processor.request_states


def text_of(engine, tokens):
    return engine._tokenizer.decode(tokens, skip_special_tokens=False)


async def test_a_version_is_applied_by_the_event_that_has_its_digest(vllm_run):
    announced = await vllm_run.install_next()
    vllm_run.engine._synchronizer.flush()
    await reports_accepted(vllm_run.log)
    applied = [entry.event for entry in await events_of(vllm_run.log, WeightsApplied)]
    assert (applied[-1].version, applied[-1].digest) == (ref(announced), announced.version_digest)
    proof = applied[-1].proof
    assert (proof.status, proof.checks, proof.unproven) == ("proven", ("names", "served"), ())
    assert proof.tensors == len(dict(vllm_run.model.named_parameters()))


async def test_what_it_computes_with_follows_from_the_version_alone(vllm_run):
    before = await vllm_run.engine.prove()
    first = await vllm_run.install_next()
    after = await vllm_run.engine.prove()
    assert before != after
    await vllm_run.install_next()
    await vllm_run.engine.install(first)
    assert await vllm_run.engine.prove() == after


def first_token(engine, monkeypatch):
    """Return the event of the first token that vLLM samples from now on."""
    from vllm.sampling_params import RequestOutputKind

    sampled, real = anyio.Event(), engine._engine.generate

    async def generate(prompt, params, name):
        params.output_kind = RequestOutputKind.CUMULATIVE
        async for output in real(prompt, params, name):
            sampled.set()
            yield output

    monkeypatch.setattr(engine._engine, "generate", generate)
    return sampled


@pytest.mark.parametrize("pause_mode", ["keep", "retract"])
async def test_turns_go_on_with_a_version_that_comes_and_each_token_has_its_own(
    vllm_run, pause_mode, monkeypatch
):
    engine = vllm_run.engine
    sampled = first_token(engine, monkeypatch)
    engine.pause_mode = pause_mode
    engine._end_tokens = ()
    before = engine.serves
    # Of several lengths, so that some are halfway at any time.
    requests, generations = [], []
    for ordinal in range(64):
        requests += requests_for([ordinal], samples=4, tokens=24 + ordinal % 25)
    lengths = [request.sampling.max_new_tokens for request in requests]
    try:
        announced = await vllm_run.publish()
        async with anyio.create_task_group() as tasks:

            async def generate():
                while engine.serves != ref(announced):  # a fetch lasts longer on a busy machine
                    generations.extend(await engine.generate(requests))

            tasks.start_soon(generate)
            await sampled.wait()
            await engine.install(announced)
    finally:
        engine.pause_mode = "wait"
        engine._end_tokens = (1,)
    assert [len(each.tokens) for each in generations] == lengths * (
        len(generations) // len(lengths)
    )
    order = [before, ref(announced)]
    for generation in generations:
        versions = [version for version, _ in generation.versions]
        assert versions in ([order[0]], [order[1]], order)
        assert sum(count for _, count in generation.versions) == len(generation.tokens)
    assert any(len(each.versions) == 2 for each in generations)


async def test_a_version_that_is_damaged_on_the_way_leaves_the_earlier_one_served(
    vllm_run, weights_url
):
    served = vllm_run.engine.serves
    announced = await vllm_run.publish()
    with open_client(weights_url) as chunks:
        chunks.setrange(
            chunk_key(vllm_run.log.run_id, announced.epoch, announced.step, 0, 0), 5, b"\x55"
        )
    with pytest.raises(CorruptVersion) as raised:
        await vllm_run.engine.install(announced)
    assert (raised.value.rank, raised.value.chunk) == (0, 0)
    assert vllm_run.engine.serves == served
    [generation] = await vllm_run.engine.generate(requests_for([0], samples=1))
    assert generation.versions[0][0] == served


async def test_an_argument_that_follows_from_the_run_is_refused(vllm_folder):
    from trinity_workers.rollout_engines import EngineOptions, load_engine

    options = EngineOptions(
        model_folder=vllm_folder, options={"engine_args": {"dtype": "bfloat16"}}
    )
    with raises(VLLMUnusable, fault="arguments", arguments=("dtype",)):
        load_engine("vllm", options)


async def test_a_killed_core_ends_calls_within_seconds_and_leaves_no_process(vllm_folder):
    engine = await in_thread(open_engine, vllm_folder, None)
    engine.serves = engine._base = FIRST
    engine._end_tokens = ()
    processes = engine._engine.engine_core.resources.engine_manager.processes
    killed_at = 0.0

    async def kill():
        nonlocal killed_at
        while not engine._calls:
            await anyio.sleep(0)
        killed_at = time.monotonic()
        os.kill(processes[0].pid, signal.SIGKILL)

    async def generate_until_killed():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            while True:
                await engine.generate(requests_for(range(8), samples=8, tokens=48))

    with pytest.raises(EngineEnded), ungrouped():
        await generate_until_killed()
    assert time.monotonic() - killed_at < 10
    with pytest.raises(EngineEnded):
        await engine.generate(requests_for([0]))
    await engine.close()
    assert not any(process.is_alive() for process in processes)


async def test_the_arguments_that_are_checked_are_those_of_vllm():
    """Read from its source, as an import of vLLM is too slow for a check."""
    from vllm import AsyncEngineArgs

    assert find_engine_arguments() == {field.name for field in dataclasses.fields(AsyncEngineArgs)}
