"""Pauses of vLLM for a version: their modes, and updates that break, hang, or lose their core."""

import multiprocessing
import os
import signal
import time

import anyio
import pytest

from tests.support.errors import raises
from tests.support.pipeline import events_of, reports_accepted
from tests.support.rollout_engines import in_thread, logprobs_of, requests_for
from tests.vllm.conftest import ENGINE_ARGS, open_engine
from tests.vllm.test_engine import first_token, ref
from trinity_events import Synchronizer
from trinity_events.system.error_text import ungrouped
from trinity_schemas import GenerationPaused, GenerationResumed
from trinity_workers.rollout_engines import EngineEnded, NotServing
from trinity_workers.rollout_engines.vllm.core_watch import CoreWatch
from trinity_workers.rollout_engines.vllm.options import VLLMUnusable

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.processes, pytest.mark.heavy]


async def last_pause(run):
    run.engine._synchronizer.flush()
    await reports_accepted(run.log)
    paused = [entry.event for entry in await events_of(run.log, GenerationPaused)]
    resumed = [entry.event for entry in await events_of(run.log, GenerationResumed)]
    return paused[-1], resumed[-1]


async def test_a_version_aborts_the_requests_that_it_meets(vllm_run, monkeypatch):
    engine = vllm_run.engine
    sampled = first_token(engine, monkeypatch)
    monkeypatch.setattr(engine, "pause_mode", "abort")
    monkeypatch.setattr(engine, "_end_tokens", ())
    requests = requests_for(range(32), samples=4, tokens=48)
    announced = await vllm_run.publish()
    generations = []
    async with anyio.create_task_group() as tasks:

        async def generate():
            while engine.serves != ref(announced):  # a fetch lasts longer on a busy machine
                generations.extend(await engine.generate(requests))

        tasks.start_soon(generate)
        await sampled.wait()
        await engine.install(announced)
    aborted = [each for each in generations if each.aborted]
    assert aborted and len({len(each.versions) for each in generations if not each.aborted}) <= 1
    paused, resumed = await last_pause(vllm_run)
    assert (paused.version, paused.mode) == (ref(announced), "abort")
    assert (resumed.serves, resumed.aborted) == (ref(announced), len(aborted))
    assert paused.in_flight >= len(aborted)
    again = await engine.generate(requests[:4])
    for request, generation in zip(requests, again, strict=False):
        reference = logprobs_of(vllm_run.model, request, generation.tokens)
        assert generation.logprobs == pytest.approx(reference, abs=2e-5)


async def test_a_pause_that_ends_amid_an_update_generates_nothing_with_half_of_it(
    vllm_run, monkeypatch
):
    engine = vllm_run.engine
    announced = await vllm_run.publish()
    load, states = engine._load, []

    async def load_resumed(ready):
        reports = await load(ready)
        await engine.resume()
        states.append(await engine._engine.is_paused())
        return reports

    monkeypatch.setattr(engine, "_load", load_resumed)
    await engine.pause(60.0)
    await engine.install(announced)
    assert states == [True]
    assert not await engine._engine.is_paused()
    assert (await engine.generate(requests_for([0], samples=1)))[0].versions[0][0] == ref(announced)


async def test_an_update_whose_end_fails_leaves_no_session_open(vllm_run, monkeypatch):
    engine = vllm_run.engine
    announced = await vllm_run.publish()

    async def fail(_label):
        raise RuntimeError("planted: it could not be finished")

    with monkeypatch.context() as patch:
        patch.setattr(engine._engine, "finish_weight_update", fail)
        with raises(VLLMUnusable, fault="install", step=announced.step):
            await engine.install(announced)
    await engine.resume()
    with pytest.raises(NotServing):
        await engine.generate(requests_for([0], samples=1))
    paused, resumed = await last_pause(vllm_run)
    assert (paused.version, resumed.serves) == (ref(announced), None)
    assert (await vllm_run.install_next()).step == announced.step + 1
    assert await engine.generate(requests_for([0], samples=1))


async def test_a_core_that_is_killed_amid_an_update_ends_it_within_seconds(
    vllm_run, vllm_folder, redis_url, weights_url
):
    urls = {"redis_url": redis_url, "weights_url": weights_url}
    synchronizer = Synchronizer(vllm_run.log.run_id, 0, role="explorer", rank=1, **urls)
    # Room for half of the requests: vLLM preempts others, and computes their prompts again.
    args = ENGINE_ARGS | {"kv_cache_memory_bytes": 1 << 20}
    engine = await in_thread(open_engine, vllm_folder, synchronizer, args)
    await engine.install(await vllm_run.publish())
    requests = requests_for(range(16), samples=4, tokens=40)
    for request, generation in zip(requests, await engine.generate(requests), strict=True):
        reference = logprobs_of(vllm_run.model, request, generation.tokens)
        assert generation.logprobs == pytest.approx(reference, abs=2e-5)
    await engine._engine.collective_rpc("trinity_plant", args=("hang",))
    processes = engine._engine.engine_core.resources.engine_manager.processes
    announced = await vllm_run.publish()
    killed_at = 0.0

    async def kill():
        nonlocal killed_at
        while not engine._is_updating:
            await anyio.sleep(0.01)
        await anyio.sleep(0.5)
        killed_at = time.monotonic()
        os.kill(processes[0].pid, signal.SIGKILL)

    async def install_amid_kill():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            await engine.install(announced)

    with pytest.raises(EngineEnded), ungrouped():
        await install_amid_kill()
    assert time.monotonic() - killed_at < 10
    await engine.close()
    synchronizer.close()
    await vllm_run.engine.install(announced)  # nothing of it is stuck for the others


async def test_an_update_that_hangs_ends_the_engine_at_its_deadline(
    vllm_run, vllm_folder, redis_url, weights_url
):
    urls = {"redis_url": redis_url, "weights_url": weights_url, "deadline": 3.0}
    synchronizer = Synchronizer(vllm_run.log.run_id, 0, role="explorer", rank=2, **urls)
    engine = await in_thread(open_engine, vllm_folder, synchronizer)
    await engine._engine.collective_rpc("trinity_plant", args=("hang",))
    announced = await vllm_run.publish()
    began = time.monotonic()
    with pytest.raises(EngineEnded):
        await engine.install(announced)
    assert time.monotonic() - began < 20
    processes = engine._engine.engine_core.resources.engine_manager.processes
    with pytest.raises((EngineEnded, NotServing)):
        await engine.generate(requests_for([0], samples=1))
    await engine.close()
    synchronizer.close()
    await vllm_run.engine.install(announced)
    assert not any(process.is_alive() for process in processes)


async def test_a_death_that_vllm_notices_first_ends_the_engine_in_the_same_way():
    from vllm.v1.engine.exceptions import EngineDeadError

    core = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), name="core")
    core.start()
    try:
        with raises(EngineEnded, engine="vLLM", process="core"):
            async with CoreWatch([core]).alive():
                raise EngineDeadError
    finally:
        core.kill()
        core.join()
