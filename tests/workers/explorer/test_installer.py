"""The installer keeps an engine on the newest version, whatever befalls the versions."""

import re
import secrets
from contextlib import asynccontextmanager, closing
from types import SimpleNamespace

import anyio
import anyio.to_thread
import pytest

from tests.support.errors import raises

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.fake_devices import HostDevice  # noqa: E402
from tests.support.pipeline import events_of, reducer_task, reports_accepted, until  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from tests.support.weight_versions import publish, ready  # noqa: E402
from trinity_events import Synchronizer  # noqa: E402
from trinity_events.errors import (  # noqa: E402
    CorruptVersion,
    DeadlineExceeded,
    VersionUnavailable,
)
from trinity_events.server import open_client  # noqa: E402
from trinity_events.system.shared_memory import available  # noqa: E402
from trinity_events.weights import CudaStore, model_digest  # noqa: E402
from trinity_events.weights.transports import stores  # noqa: E402
from trinity_schemas import RunClosed, Sampling, StepRef, WeightsApplied, chunk_key  # noqa: E402
from trinity_workers.explorer.installer import VersionInstaller, VersionPrefetcher  # noqa: E402
from trinity_workers.explorer.run_follower import followed_run  # noqa: E402
from trinity_workers.explorer.versions import RunEnded, VersionFollower  # noqa: E402
from trinity_workers.learning.policy import load_policy  # noqa: E402
from trinity_workers.rollout_engines import (  # noqa: E402
    EngineOptions,
    GenerationRequest,
    NotServing,
    load_engine,
)

TRANSPORTS = [
    "redis",
    pytest.param("shm", marks=pytest.mark.skipif(not available(), reason="no shared memory")),
]


@pytest.fixture
async def config(make_config, redis_url, run_id):
    """A run with a reducer."""
    async with reducer_task(redis_url, run_id):
        yield make_config(sync={"timeout": PATIENCE})


@pytest.fixture
def trainer(config):
    with trainer_of(config) as made:
        yield made


def trainer_of(config):
    return closing(
        Synchronizer(
            config.run_id,
            config.epoch,
            redis_url=config.redis_url,
            weights_url=config.weights_url,
            transport=config.transport,
        )
    )


@asynccontextmanager
async def explorer_of(config):
    """An engine that serves nothing yet, its installer, and the follower beside it."""
    synchronizer = Synchronizer(
        config.run_id,
        0,
        redis_url=config.redis_url,
        weights_url=config.weights_url,
        role="explorer",
        rank=0,
    )
    options = EngineOptions(model_folder=config.model_folder, synchronizer=synchronizer)
    engine = await anyio.to_thread.run_sync(load_engine, "huggingface", options)
    prefetcher = VersionPrefetcher(config, synchronizer)
    async with followed_run(config.run_id, config.redis_url) as run:
        versions = VersionFollower(run, config.epoch)
        with closing(synchronizer):
            async with versions.listening(), prefetcher.listening(run):
                parts = engine, synchronizer, versions, prefetcher
                yield SimpleNamespace(
                    engine=engine,
                    versions=versions,
                    installer=VersionInstaller(config, *parts),
                    # The same engine, with little patience.
                    impatient=VersionInstaller(
                        config.replaced("sync", timeout=1.0),
                        engine,
                        synchronizer,
                        versions,
                        prefetcher,
                    ),
                )


async def published(trainer, config, step):
    """Publish the weights of a step; return their digest."""
    model, _ = load_policy(config.model_folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.125 * step)
    await anyio.to_thread.run_sync(publish, trainer, dict(model.named_parameters()), step)
    return model_digest(model)


def spoil(config, step, how):
    key = chunk_key(config.run_id, config.epoch, step, 0, 0)
    with open_client(config.weights_url) as client:
        if how == "gone":
            assert client.delete(key)
        else:  # as by a second upload of the step, which has the same keys
            client.setrange(key, 100, secrets.token_bytes(8))


def request():
    return GenerationRequest(
        tokens=[5, 6], sampling=Sampling(max_new_tokens=2), ordinal=0, sample=0
    )


async def test_the_newest_version_is_installed_and_said_to_be_served(config, trainer, log):
    digests = [await published(trainer, config, step) for step in (0, 1)]
    async with explorer_of(config) as explorer:
        await explorer.versions.wait(1, deadline=PATIENCE)
        assert not explorer.installer.is_current
        await explorer.installer.refresh(0)
        assert explorer.engine.serves == StepRef(config.epoch, 1)
        assert await explorer.engine.prove() == digests[1]
        assert explorer.installer.is_current
        await explorer.installer.refresh(1)
        assert explorer.installer.installed == 1, "what is served is not installed again"
    await reports_accepted(log)
    applied = [entry.event for entry in await events_of(log, WeightsApplied)]
    assert [event.version for event in applied] == [StepRef(config.epoch, 1)]


async def test_a_version_that_is_not_there_yet_is_waited_for_and_nothing_is_served_meanwhile(
    config, trainer
):
    await published(trainer, config, 0)
    async with explorer_of(config) as explorer:
        await explorer.installer.refresh(0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(explorer.installer.refresh, 1)
            await until(lambda: explorer.engine.serves is None)
            with pytest.raises(NotServing):
                await explorer.engine.generate([request()])
            digest = await published(trainer, config, 1)
        assert explorer.engine.serves == StepRef(config.epoch, 1)
        assert await explorer.engine.prove() == digest
        assert explorer.installer.installed == 2


async def must_not_be_released():
    raise AssertionError("a delta is applied to the weights that are served")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_engine_that_takes_deltas_serves_while_it_waits(
    make_config, redis_url, run_id, transport
):
    async with reducer_task(redis_url, run_id):
        config = make_config(sync={"timeout": PATIENCE, "full_every": 4, "transport": transport})
        with trainer_of(config) as trainer:
            await published(trainer, config, 0)
            async with explorer_of(config) as explorer:
                await explorer.installer.refresh(0)
                explorer.engine.release = must_not_be_released
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(explorer.installer.refresh, 1)
                    await anyio.wait_all_tasks_blocked()
                    assert explorer.engine.serves == StepRef(config.epoch, 0)
                    assert await explorer.engine.generate([request()])
                    digest = await published(trainer, config, 1)
                assert await explorer.engine.prove() == digest


@pytest.mark.skipif(not available(), reason="the host has no shared memory as files")
async def test_chunks_that_come_while_it_waits_make_the_version_that_is_announced(
    make_config, redis_url, run_id
):
    async with reducer_task(redis_url, run_id):
        config = make_config(sync={"timeout": PATIENCE, "transport": "shm"})
        with trainer_of(config) as trainer:
            async with explorer_of(config) as explorer:
                for step in range(3):
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(explorer.installer.refresh, step)
                        await until(lambda: explorer.engine.serves is None)
                        digest = await published(trainer, config, step)
                    assert explorer.engine.serves == StepRef(config.epoch, step)
                    assert await explorer.engine.prove() == digest


async def test_a_version_in_a_devices_memory_is_installed_and_proven(
    make_config, redis_url, run_id, log, monkeypatch
):
    class Standin(CudaStore):
        def __init__(self):
            super().__init__(HostDevice())

    monkeypatch.setattr(stores, "CudaStore", Standin)
    async with reducer_task(redis_url, run_id):
        config = make_config(
            sync={"timeout": PATIENCE, "transport": "cuda-ipc"}, trainer={"ranks": 1}
        )
        with trainer_of(config) as trainer:
            async with explorer_of(config) as explorer:
                for step in range(2):
                    digest = await published(trainer, config, step)
                    await explorer.installer.refresh(step)
                    assert await explorer.engine.prove() == digest
                await reports_accepted(log)
    applied = [entry.event for entry in await events_of(log, WeightsApplied)]
    assert [(event.version.step, event.proof.status) for event in applied] == [
        (0, "proven"),
        (1, "proven"),
    ]


@pytest.mark.parametrize("how", ["changed", "gone"])
async def test_a_version_of_no_use_is_passed_over_for_the_next(config, trainer, how, caplog):
    await published(trainer, config, 0)
    spoil(config, 0, how)
    async with explorer_of(config) as explorer:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(explorer.installer.refresh, 0)
            await until(lambda: "waits for newer weights" in caplog.text)
            digest = await published(trainer, config, 1)
        assert explorer.engine.serves == StepRef(config.epoch, 1)
        assert await explorer.engine.prove() == digest
        assert explorer.installer.installed == 1


@pytest.mark.parametrize("how", ["changed", "gone"])
async def test_a_version_of_no_use_is_not_waited_for_while_the_earlier_one_will_do(
    config, trainer, how, log
):
    before = await published(trainer, config, 0)
    async with explorer_of(config) as explorer:
        await explorer.installer.refresh(0)
        await published(trainer, config, 1)
        spoil(config, 1, how)
        await explorer.versions.wait(1, deadline=PATIENCE)
        with anyio.fail_after(PATIENCE):
            await explorer.installer.refresh(0)
        assert explorer.engine.serves == StepRef(config.epoch, 0)
        assert await explorer.engine.prove() == before
        digest = await published(trainer, config, 2)
        await ready(log, 2)
        await explorer.installer.refresh(1)
        assert await explorer.engine.prove() == digest


@pytest.mark.parametrize(
    ("how", "cause"), [("changed", CorruptVersion), ("gone", VersionUnavailable)]
)
async def test_the_error_after_the_deadline_says_what_was_wrong_with_the_last_version(
    config, trainer, how, cause
):
    await published(trainer, config, 0)
    spoil(config, 0, how)
    async with explorer_of(config) as explorer:
        await explorer.versions.wait(0, deadline=PATIENCE)
        with raises(DeadlineExceeded, missing=re.compile("weights of step 0 ")) as caught:
            await explorer.impatient.refresh(0)
    assert isinstance(caught.value.__cause__, cause)
    assert str(caught.value.__cause__) in caught.value.reason


async def test_the_error_after_the_deadline_says_that_no_version_came(config):
    async with explorer_of(config) as explorer:
        with raises(
            DeadlineExceeded, missing=re.compile("weights of step 3 "), reason=re.compile("none")
        ):
            await explorer.impatient.refresh(3)


async def test_a_version_that_will_never_come_ends_the_wait_with_the_run(
    config, trainer, publisher
):
    await published(trainer, config, 0)
    async with explorer_of(config) as explorer:
        await explorer.installer.refresh(0)

        async def close():
            await publisher.publish(RunClosed(reason="interrupted"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close)
            with raises(RunEnded, newest=None, reason="interrupted"):
                await explorer.installer.refresh(1)
