"""A vLLM server that an explorer drives: versions, proof, restarts, and what others do to it."""

import secrets

import anyio
import httpx
import pytest
import pytest_asyncio

from tests.support.errors import raises
from tests.support.pipeline import events_of, reducer_task, reports_accepted
from tests.support.rollout_engines import in_thread, logprobs_of, requests_for
from tests.support.vllm_server import VLLMServer
from tests.vllm.conftest import VLLMRun
from tests.vllm.test_probes import PROBES, checking, last_events
from trinity_events.errors import NotAsPublished
from trinity_events.log import RedisEventLog, open_run
from trinity_events.server import connect
from trinity_schemas import ExplorerStatusChanged, StepRef, WeightsApplied
from trinity_workers.rollout_engines import EngineOptions, NotServing, load_engine
from trinity_workers.rollout_engines.vllm.server_client import VLLMServerAway
from trinity_workers.rollout_engines.vllm.server_options import VLLMServerUnusable

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.processes, pytest.mark.heavy]

HEAD = "model.embed_tokens.weight"


def open_server_engine(folder, url, synchronizer=None, **options):
    return load_engine(
        "vllm-server",
        EngineOptions(
            model_folder=folder, synchronizer=synchronizer, options={"url": url, **options}
        ),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served_run(redis_url, weights_url, vllm_folder, tmp_path_factory):
    """A run whose explorer drives a server, with its first version."""
    from trinity_events import Synchronizer

    run_id = f"test-{secrets.token_hex(6)}"
    urls = {"redis_url": redis_url, "weights_url": weights_url}
    server = VLLMServer(vllm_folder, tmp_path_factory.mktemp("server") / "log")
    try:
        async with connect(redis_url) as client:
            epoch = await open_run(client, run_id)
            async with reducer_task(redis_url, run_id, tmp_path_factory.mktemp("run")):
                trainer = Synchronizer(run_id, epoch, **urls)
                explorer = Synchronizer(run_id, 0, role="explorer", **urls)
                engine = await in_thread(open_server_engine, vllm_folder, server.url, explorer)
                run = VLLMRun(engine, trainer, RedisEventLog(client, run_id), vllm_folder)
                run.server = server
                await run.install_next()
                yield run
                await engine.close()
                explorer.close()
                trainer.close()
    finally:
        server.kill()


async def check_answers(run):
    """Compare what the engine answers with the weights of the version that it names."""
    requests = requests_for(range(4), samples=2, tokens=10)
    for request, generation in zip(requests, await run.engine.generate(requests), strict=True):
        reference = logprobs_of(run.model, request, generation.tokens)
        assert generation.logprobs == pytest.approx(reference, abs=2e-5)
        assert generation.versions == [(run.engine.serves, len(generation.tokens))]


def plain_request(url, timeout=30.0):
    """Ask as a client that knows nothing of versions."""
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}
    return httpx.post(f"{url}/inference/v1/generate", json=body, timeout=timeout)


async def test_answers_are_those_of_the_version_that_they_name(served_run):
    await check_answers(served_run)
    announced = await served_run.install_next()
    assert served_run.engine.serves == StepRef(announced.epoch, announced.step)
    await check_answers(served_run)


async def test_a_version_is_applied_with_its_proof_at_the_url_of_the_server(served_run):
    announced = await served_run.install_next()
    served_run.engine._synchronizer.flush()
    await reports_accepted(served_run.log)
    applied = [entry.event for entry in await events_of(served_run.log, WeightsApplied)][-1]
    assert applied.digest == announced.version_digest
    assert (applied.proof.status, applied.proof.checks) == ("proven", ("names", "served"))
    statuses = [entry.event for entry in await events_of(served_run.log, ExplorerStatusChanged)]
    assert statuses[-1] == ExplorerStatusChanged(status="running", endpoint=served_run.server.url)


async def test_turns_go_on_with_a_version_that_comes_and_each_token_has_its_own(served_run):
    engine = served_run.engine
    engine.pause_mode, engine._end_tokens = "keep", ()
    before = engine.serves
    requests = requests_for(range(16), samples=4, tokens=48)
    generations = []
    try:
        announced = await served_run.publish()
        async with anyio.create_task_group() as tasks:

            async def generate():
                while engine.serves != StepRef(announced.epoch, announced.step):
                    generations.extend(await engine.generate(requests))

            tasks.start_soon(generate)
            await engine.install(announced)
    finally:
        engine.pause_mode, engine._end_tokens = "wait", (1,)
    order = [before, engine.serves]
    for generation in generations:
        assert [version for version, _ in generation.versions] in (order[:1], order[1:], order)
        assert sum(count for _, count in generation.versions) == len(generation.tokens) == 48


@pytest.mark.parametrize("fault", ["stale-head", f"flip:{HEAD}:last", "no-transfer", "break:10"])
async def test_a_fault_is_seen_and_no_client_of_the_server_is_answered(served_run, fault):
    await served_run.plant(fault)
    announced = await served_run.publish()
    try:
        with raises(NotAsPublished, step=announced.step):
            await served_run.engine.install(announced)
    finally:
        await served_run.plant(None)
    with pytest.raises(NotServing):
        await served_run.engine.generate(requests_for([0], samples=1))
    with pytest.raises(httpx.ReadTimeout):
        plain_request(served_run.server.url, timeout=0.5)
    await served_run.install_next()
    assert plain_request(served_run.server.url).status_code == 200
    await check_answers(served_run)


async def test_probes_are_computed_over_http_and_refuse_another_version(served_run):
    with checking(served_run.engine, PROBES):
        await served_run.engine.install(await served_run.publish(with_probes=True))
        [generation] = await served_run.engine.generate(requests_for([0], samples=1))
        assert generation.proof == "partly"
        applied = await last_events(served_run, WeightsApplied)
        assert (applied.proof.probes, applied.proof.checks) == (4, ("names", "probes"))
        assert 0 < applied.proof.difference < 1e-5
        await served_run.plant("stale-head")
        announced = await served_run.publish(with_probes=True)
        with raises(NotAsPublished, step=announced.step, fault="probes"):
            await served_run.engine.install(announced)
        await served_run.plant(None)
        with pytest.raises(httpx.ReadTimeout):
            plain_request(served_run.server.url, timeout=0.5)
    await served_run.install_next()
    await check_answers(served_run)


async def test_a_label_that_another_client_sets_is_never_sent_on(served_run):
    engine, url = served_run.engine, served_run.server.url
    label = engine._label(engine.serves)
    other = f"{engine.serves.epoch}-{engine.serves.step}-other"
    httpx.post(f"{url}/update_weight_version", json={"new_version": other}).raise_for_status()
    with pytest.raises(VLLMServerAway) as raised:
        await engine.generate(requests_for([0], samples=1))
    assert other in raised.value.reason
    assert engine.serves is None
    await served_run.install_next()
    assert engine._label(engine.serves) != label
    await check_answers(served_run)


async def test_a_server_has_one_explorer(served_run, vllm_folder):
    second = await in_thread(
        open_server_engine,
        vllm_folder,
        served_run.server.url,
        served_run.engine._synchronizer,
    )
    with raises(VLLMServerUnusable, fault="driven"):
        await second.install(await served_run.publish())
    await second.close()
    await check_answers_of_served(served_run)


async def check_answers_of_served(run):
    [generation] = await run.engine.generate(requests_for([0], samples=1))
    assert generation.versions[0][0] == run.engine.serves


async def test_a_server_of_another_dtype_is_refused(served_run, vllm_folder):
    options = EngineOptions(
        model_folder=vllm_folder, dtype="bfloat16", options={"url": served_run.server.url}
    )
    with raises(VLLMServerUnusable, fault="setting", setting="dtype", value="float32"):
        await in_thread(load_engine, "vllm-server", options)


async def test_a_server_that_starts_again_serves_nothing_before_it_has_a_version(served_run):
    engine, server = served_run.engine, served_run.server
    engine._end_tokens = ()
    await served_run.publish()
    announced = await served_run.publish()
    failures = []

    async def generate():
        try:
            while True:
                await engine.generate(requests_for(range(8), samples=8, tokens=48))
        except VLLMServerAway as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(generate)
        while not engine._calls:
            await anyio.sleep(0)
        server.kill()
    assert failures and engine.serves is None
    server.start()
    engine._end_tokens = (1,)
    await engine.install(announced)
    await check_answers(served_run)
    served_run.engine._synchronizer.flush()
    await reports_accepted(served_run.log)
    statuses = [
        entry.event.status for entry in await events_of(served_run.log, ExplorerStatusChanged)
    ]
    assert statuses[-2:] == ["require_sync", "running"]
