"""The conformance kit on vLLM: all legal sequences, and random ones by night."""

import asyncio

import pytest

from tests.vllm.test_engine import ref
from trinity_events.errors import NotAsPublished
from trinity_workers.rollout_engines.conformance import (
    TransformersOracle,
    check_sequence,
    legal_sequences,
    random_sequence,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.processes, pytest.mark.heavy]


class VLLMDriver:
    """The engine of a run, whose calls into vLLM are held up between the parts of an update."""

    def __init__(self, run, oracle):
        self._run, self._oracle, self._engine = run, oracle, run.engine
        self._real = run.engine._engine.collective_rpc
        self.generate, self.resume = run.engine.generate, run.engine.resume
        self._publish_model()

    def _publish_model(self):
        self._oracle.models[self._engine.serves] = self._run.model

    @property
    def serves(self):
        return self._engine.serves

    async def pause(self):
        await self._engine.pause(60.0)

    async def wake(self):
        announced = await self._run.publish()
        self._oracle.models[ref(announced)] = self._run.model
        await self._engine.install(announced)

    async def start_update(self):
        names = ("started", "load", "loaded", "finish")
        self._steps = {name: asyncio.Event() for name in names}
        announced = await self._run.publish()
        self._oracle.models[ref(announced)] = self._run.model
        self._engine._engine.collective_rpc = self._call
        self._update = asyncio.create_task(self._engine.install(announced))
        await self._steps["started"].wait()

    async def _call(self, method, **arguments):
        if method != "update_weights":
            return await self._real(method, **arguments)
        self._steps["started"].set()
        await self._steps["load"].wait()
        result = await self._real(method, **arguments)
        self._steps["loaded"].set()
        await self._steps["finish"].wait()
        return result

    async def load(self):
        self._steps["load"].set()
        await self._steps["loaded"].wait()

    async def finish(self):
        self._steps["finish"].set()
        await self._update
        self._engine._engine.collective_rpc = self._real

    async def break_update(self):
        await self._run.plant("break:10")
        self._steps["load"].set()
        self._steps["finish"].set()
        with pytest.raises(NotAsPublished):
            await self._update
        self._engine._engine.collective_rpc = self._real
        await self._run.plant(None)

    async def invalidate_caches(self):
        await self._engine._engine.reset_prefix_cache()


async def check_all(run, mode, sequences, monkeypatch):
    monkeypatch.setattr(run.engine, "pause_mode", mode)
    oracle = TransformersOracle(mode)
    for sequence in sequences:
        if "sleep" not in sequence:  # its weights lie in vLLM's processes, and stay
            await check_sequence(VLLMDriver(run, oracle), oracle, sequence, mode)


async def test_vllm_conforms(vllm_run, monkeypatch):
    await check_all(vllm_run, "retract", legal_sequences(3), monkeypatch)


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_vllm_conforms_in_other_modes(vllm_run, mode, monkeypatch):
    sequences = [random_sequence(6, seed, mode) for seed in range(10)]
    await check_all(vllm_run, mode, sequences, monkeypatch)


@pytest.mark.nightly("vllm/test_conformance.py::test_vllm_conforms_in_other_modes")
@pytest.mark.parametrize("mode", ["wait", "keep", "retract", "abort"])
async def test_vllm_conforms_in_random_sequences(vllm_run, mode, monkeypatch):
    sequences = (random_sequence(6, seed, mode) for seed in range(500))
    await check_all(vllm_run, mode, sequences, monkeypatch)
