"""vLLM on a CPU, in an environment of its own: make vllm. One engine serves the session's tests."""

import os
import secrets
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial

import pytest
import pytest_asyncio

from tests.support.optional_packages import skip_without
from tests.support.pipeline import reducer_task
from tests.support.rollout_engines import in_thread
from tests.support.weight_versions import publish, ready
from trinity_events.log import RedisEventLog, open_run
from trinity_events.server import connect

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
ENGINE_ARGS = {"max_num_seqs": 64, "kv_cache_memory_bytes": 1 << 28}


def pytest_collection_modifyitems(items):
    reason = "vLLM is not installed: run make vllm"
    skip_without("vllm", items, folder="tests/vllm", reason=reason)


@pytest.fixture(scope="session")
def vllm_folder(tmp_path_factory):
    from tests.support.vllm_policies import create_vllm_policy

    return create_vllm_policy(tmp_path_factory.mktemp("vllm-policy"))


class VLLMRun:
    """A run with a trainer of one rank, and one engine of vLLM that installs its versions."""

    def __init__(self, engine, trainer, log, folder, lora=None, dtype="float32"):
        self.engine, self.log, self.folder = engine, log, folder
        self._seals_probes = engine._proof.runs_probes
        self._trainer, self._lora, self._dtype = trainer, lora, dtype
        self._step = -1

    @property
    def model(self):
        """Model of the last published version."""
        return self._model

    async def publish(self, *, with_probes=None, change=None):
        """Publish other weights, and return their announcement.

        ``change`` alters the model after its probes were computed.
        """
        from tests.support.rollout_engines import compute_probes, weights

        self._step += 1
        self._model, tensors = weights(self.folder, self._step, self._lora, self._dtype)
        is_sealed = self._seals_probes if with_probes is None else with_probes
        probes = compute_probes(self._model, dtype=self._dtype) if is_sealed else None
        if change is not None:
            change(self._model)
        await in_thread(lambda: publish(self._trainer, tensors, self._step, probes=probes))
        return await ready(self.log, self._step)

    async def plant(self, fault):
        await self.engine._engine.collective_rpc("trinity_plant", args=(fault,))

    async def install_next(self):
        announced = await self.publish()
        await self.engine.install(announced)
        return announced


def open_engine(folder, synchronizer=None, args=ENGINE_ARGS, **options):
    """Open an engine in whose workers faults can be planted."""
    import torch

    from tests.support.vllm_faults import EXTENSION
    from trinity_workers.rollout_engines import EngineOptions, load_engine

    torch.set_num_threads(1)
    args = {**args, "worker_extension_cls": EXTENSION}
    return load_engine(
        "vllm",
        EngineOptions(
            model_folder=folder,
            synchronizer=synchronizer,
            options={"engine_args": args},
            **options,
        ),
    )


@asynccontextmanager
async def open_vllm_run(redis_url, weights_url, folder, root, **options):
    """Open a run whose engine of vLLM has its first version."""
    from trinity_events import Synchronizer

    run_id = f"test-{secrets.token_hex(6)}"
    urls = {"redis_url": redis_url, "weights_url": weights_url}
    async with AsyncExitStack() as exits:
        client = await exits.enter_async_context(connect(redis_url))
        epoch = await open_run(client, run_id)
        await exits.enter_async_context(reducer_task(redis_url, run_id, root))
        trainer = exits.enter_context(closing(Synchronizer(run_id, epoch, **urls)))
        explorer = exits.enter_context(closing(Synchronizer(run_id, 0, role="explorer", **urls)))
        engine = await in_thread(partial(open_engine, folder, explorer, **options))
        exits.push_async_callback(engine.close)
        lora, dtype = options.get("lora"), options.get("dtype", "float32")
        log = RedisEventLog(client, run_id)
        run = VLLMRun(engine, trainer, log, folder, lora, dtype)
        await run.install_next()
        yield run


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_run(redis_url, weights_url, vllm_folder, tmp_path_factory):
    """A run that the session's tests share."""
    root = tmp_path_factory.mktemp("run")
    async with open_vllm_run(redis_url, weights_url, vllm_folder, root) as run:
        yield run
