"""The conformance kit: it passes a double and the Hugging Face engine, and sees planted faults."""

import asyncio
import threading
from contextlib import contextmanager

import anyio
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.rollout_engines import engine_of, in_thread, weights  # noqa: E402
from trinity_events.diagnostics.waits import NO_REPORTS  # noqa: E402
from trinity_events.weights.pauses import Pause  # noqa: E402
from trinity_schemas import StepReady, StepRef  # noqa: E402
from trinity_workers.learning.policy import load_policy  # noqa: E402
from trinity_workers.rollout_engines import Generation, NotServing  # noqa: E402
from trinity_workers.rollout_engines.conformance import (  # noqa: E402
    EngineNotConforming,
    TransformersOracle,
    check_sequence,
    legal_sequences,
    random_sequence,
)

DEPTH = 6
"""Operations of a sequence on the double; 3 on real engines, whose sequences take milliseconds."""


# --- a double --------------------------------------------------------------------------------


class Double:
    """Engine whose weights are the numbers of the versions that its tensors are of.

    A token is (tensors, cache): the versions that it is computed with. Faults are planted by name.
    """

    TOKENS = 3

    def __init__(self, fault=""):
        self.fault = fault
        self.serves = StepRef(1, 0)
        self.tensors, self.target, self.cache = [0, 0], 0, 0
        self.paused = self.updating = False
        self.moved = asyncio.Condition()

    async def generate(self, requests):
        tokens, versions, cut = [], [], False
        if self.fault == "lost call" and self.paused:
            await anyio.sleep_forever()
        for place in range(self.TOKENS):
            if place or self.fault != "late pause":
                await self._pass()
            if self.serves is None:
                raise NotServing
            tokens.append((*self.tensors, self.cache))
            versions.append((self.serves, 1))
            await asyncio.sleep(0)
            cut = cut or (self.fault == "cut answers" and self.paused)
        return [
            Generation(
                tokens=tokens,
                logprobs=[0.0] * len(tokens),
                versions=versions[: 2 if cut else None],
                finished=True,
            )
            for _ in requests[: len(requests) - (self.fault == "one answer less")]
        ]

    async def _pass(self):
        async with self.moved:
            await self.moved.wait_for(lambda: not self._is_held())

    def _is_held(self):
        if self.fault == "resume amid update" and self.updating:
            return self.paused
        return self.paused or self.updating

    async def _set(self, **values):
        async with self.moved:
            for name, value in values.items():
                setattr(self, name, value)
            self.moved.notify_all()

    async def pause(self):
        await self._set(paused=self.fault != "no pause")

    async def resume(self):
        await self._set(paused=self.fault == "stuck pause")

    async def sleep(self):
        if self.fault != "sleeps awake":
            await self._set(serves=None)
            self.tensors = [-1, -1]

    async def wake(self):
        loaded = -1 if self.fault == "wakes with base weights" else self.target
        self.tensors, self.cache = [loaded, loaded], loaded
        await self._set(serves=StepRef(1, self.target))

    async def start_update(self):
        await self._set(updating=True)
        self.target += 1
        self.tensors[0] = self.target
        if self.fault == "early label":
            self.serves = StepRef(1, self.target)
            await self._set(updating=False)

    async def load(self):
        if self.fault != "tied head":
            self.tensors[1] = self.target

    async def break_update(self):
        served = StepRef(1, self.target - 1) if self.fault == "half under the old label" else None
        self.target -= 1
        await self._set(updating=self.fault == "session left open", serves=served)

    async def finish(self):
        if self.fault != "stale cache":
            self.cache = self.target
        label = self.target - (self.fault == "old label")
        await self._set(updating=False, serves=StepRef(1, label))

    async def invalidate_caches(self):
        if self.fault == "cache of nothing":
            self.cache = -1

    async def close(self):
        pass


class DoubleOracle:
    def find_fault(self, request, generation):
        for token, (version, _) in zip(generation.tokens, generation.versions, strict=True):
            if token != (version.step,) * 3:
                return f"{token} is not of {version}"
        return None


@pytest.mark.heavy
async def test_the_double_passes_every_legal_sequence():
    sequences = list(legal_sequences(DEPTH))
    assert len(sequences) > 1000
    for sequence in sequences:
        await check_sequence(Double(), DoubleOracle(), sequence)


@pytest.mark.parametrize(
    "fault",
    [
        *("no pause", "late pause", "stuck pause", "lost call", "one answer less", "cut answers"),
        *("resume amid update", "early label", "old label", "tied head", "stale cache"),
        *("half under the old label", "session left open", "sleeps awake"),
        *("wakes with base weights", "cache of nothing"),
    ],
)
async def test_the_kit_sees_a_planted_fault(fault):
    faults = []
    for sequence in legal_sequences(4):
        try:
            await check_sequence(Double(fault), DoubleOracle(), sequence, deadline=0.5)
        except EngineNotConforming as error:
            faults.append(error)
            break
    assert faults


# --- the Hugging Face engine -------------------------------------------------------------------


class SteppedVersions:
    """Synchronizer of versions in memory, which stands still between the steps of an update."""

    waits = NO_REPORTS

    def __init__(self, tensors):
        self.tensors = tensors
        self.reached = {name: threading.Event() for name in ("started", "loaded")}
        self.allowed = {name: threading.Event() for name in ("load", "finish")}
        self.breaks = False
        self.stepped = True

    def begin(self, *, stepped):
        for event in (*self.reached.values(), *self.allowed.values()):
            event.clear()
        self.breaks, self.stepped = False, stepped

    @contextmanager
    def pausing(self, ready, *, mode, in_flight=0):
        yield Pause()

    def apply(self, module, ready, *, cast, install_context, checks):
        with install_context():
            self.load(module, ready, cast=cast, checks=checks)

    def load(self, module, ready, *, cast, checks):
        named = [*self.tensors[ready.step % len(self.tensors)].items()]
        targets, half = dict(module.named_parameters()), len(named) // 2
        self._copy(targets, named[:half])
        self._stop("started", "load")
        if self.breaks:
            raise OSError("planted: the transport broke")
        self._copy(targets, named[half:])
        self._stop("loaded", "finish")

    @staticmethod
    def _copy(targets, named):
        with torch.no_grad():
            for name, tensor in named:
                targets[name].copy_(tensor)

    def _stop(self, reached, allowed):
        if self.stepped:
            self.reached[reached].set()
            assert self.allowed[allowed].wait(30), allowed


class HuggingFaceDriver:
    """The engine in this process, whose installation is held up between its parts."""

    def __init__(self, folder, mode, oracle, models):
        self._source = SteppedVersions([dict(model.named_parameters()) for model in models])
        self._models, self._oracle = models, oracle
        self._engine = engine_of(
            folder, synchronizer=self._source, pause_mode=mode, serves=StepRef(1, 0)
        )
        self._step = 0
        self._update = None
        self.generate, self.resume = self._engine.generate, self._engine.resume
        oracle.models.clear()
        self._publish(0)
        SteppedVersions._copy(
            dict(self._engine._model.named_parameters()), self._source.tensors[0].items()
        )

    def _publish(self, step):
        self._step = step
        self._oracle.models[StepRef(1, step)] = self._models[step % len(self._models)]
        return StepReady(epoch=1, step=step, kind="weights", caused_by="1-0")

    @property
    def serves(self):
        return self._engine.serves

    async def pause(self):
        await self._engine.pause(60.0)

    async def sleep(self):
        await self._engine.release()

    async def wake(self):
        self._source.begin(stepped=False)
        await self._engine.install(self._publish(self._step))

    async def start_update(self):
        self._source.begin(stepped=True)
        self._update = asyncio.create_task(self._engine.install(self._publish(self._step + 1)))
        await in_thread(self._source.reached["started"].wait, 30)

    async def load(self):
        self._source.allowed["load"].set()
        await in_thread(self._source.reached["loaded"].wait, 30)

    async def finish(self):
        self._source.allowed["finish"].set()
        await self._update

    async def break_update(self):
        self._source.breaks = True
        self._source.allowed["load"].set()
        with pytest.raises(OSError, match="planted"):
            await self._update
        assert self._engine.serves is None

    async def invalidate_caches(self):
        pass  # it keeps none from one turn to the next

    async def close(self):
        await self._engine.close()


def make_models(folder):
    models = [load_policy(folder)[0], *(weights(folder, step)[0] for step in (1, 2))]
    return [model.train(False) for model in models]


async def check_all(folder, mode, sequences):
    oracle, models = TransformersOracle(mode), make_models(folder)
    for sequence in sequences:
        driver = HuggingFaceDriver(folder, mode, oracle, models)
        await check_sequence(driver, oracle, sequence, mode)
        await driver.close()


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["qwen2", pytest.param("llama", marks=pytest.mark.nightly)])
async def test_the_hugging_face_engine_conforms(own_model_folder, name):
    await check_all(own_model_folder(name), "retract", legal_sequences(3))


@pytest.mark.heavy
@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
async def test_the_hugging_face_engine_conforms_in_other_modes(own_model_folder, mode):
    sequences = [random_sequence(6, seed, mode) for seed in range(5)]
    await check_all(own_model_folder(), mode, sequences)


@pytest.mark.heavy
@pytest.mark.nightly(
    "workers/rollout_engines/test_conformance.py::test_the_hugging_face_engine_conforms_in_other_modes"
)
@pytest.mark.parametrize("mode", ["wait", "keep", "retract", "abort"])
async def test_the_hugging_face_engine_conforms_in_random_sequences(own_model_folder, mode):
    sequences = (random_sequence(6, seed, mode) for seed in range(500))
    await check_all(own_model_folder(), mode, sequences)
