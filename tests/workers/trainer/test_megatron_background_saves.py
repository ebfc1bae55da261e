"""A trainer on Megatron that saves a checkpoint trains on while it is written."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch.distributed.checkpoint as dcp  # noqa: E402

from tests.support import megatron_ranks as at  # noqa: E402
from tests.support.experiences import make_groups  # noqa: E402
from tests.support.pipeline import announced, reducer_task, register_saves, until  # noqa: E402
from tests.support.rank_processes import collect  # noqa: E402
from tests.support.tensors import identical  # noqa: E402
from tests.support.waits import PATIENCE, wait_until  # noqa: E402
from trinity_events.checkpoints.layout import REDUCER_FILES  # noqa: E402
from trinity_events.checkpoints.verification import read_manifest  # noqa: E402
from trinity_events.coordinator import staged_path  # noqa: E402
from trinity_events.errors import SaveError  # noqa: E402
from trinity_schemas import (  # noqa: E402
    SaveFailed,
    SaveFinished,
    SaveStarted,
    StepFailed,
    StepReady,
    decode_envelope,
)
from trinity_workers.config.train_config import RunConfig  # noqa: E402
from trinity_workers.runtime.collective_errors import CollectiveBroken  # noqa: E402
from trinity_workers.trainer.workers.megatron import MegatronTrainWorker  # noqa: E402

pytestmark = pytest.mark.megatron

WORLD = 2


@pytest.fixture
def config(make_config) -> RunConfig:
    return make_config(trainer={"engine": "megatron", "ranks": 2}, sync={"timeout": PATIENCE})


class Workers:
    """Two workers of a trainer; both are told what to do."""

    def __init__(self, processes, config) -> None:
        self._processes = processes
        processes.leave()
        processes.start(WORLD)
        places = processes.call(range(WORLD), make_worker, config)
        self(call, "setup", *places[0])

    def __call__(self, function, *args):
        """What it returns on each rank; raises what it raised on one."""
        return self._processes.call(range(WORLD), function, *args)

    def answers(self, function, *args):
        """What it returned or raised on each rank."""
        return collect([self._processes.ask(rank, function, *args) for rank in range(WORLD)])

    def on_rank_1(self, function, *args):
        """Do it on that rank alone."""
        assert self._processes.ask(1, function, *args)() is None


@pytest.fixture
def workers(rank_processes, config):
    yield Workers(rank_processes, config)
    rank_processes.end()  # one of them writes otherwise, or is dead


def make_worker(rank, config):
    rank.objects.worker = MegatronTrainWorker(config, rank.number)
    return rank.objects.worker.address() if rank.number == 0 else None


def call(rank, method, *args):
    return getattr(rank.objects.worker, method)(*args)


def train(rank, run_id, seed):
    return rank.objects.worker.train_step(make_groups(run_id, seed))


def weights(rank):
    engine = rank.objects.worker._engine
    return {name: value.clone() for name, value in engine.get_per_tensor_param()}


def load(rank, folder):
    rank.objects.worker._engine.load_checkpoint(str(folder))


def before_it_writes(rank, do, *args):
    """Let the rank do something whenever it is about to write its tensors."""
    rank.objects.real = real = getattr(rank.objects, "real", dcp.FileSystemWriter.write_data)

    def write(self, plan, planner):
        do(*args)
        return real(self, plan, planner)

    dcp.FileSystemWriter.write_data = write


def nothing():
    return None


def wait_for(gate):
    wait_until(gate.exists, "the gate was not opened")


def fail():
    raise OSError("no room for rank 1")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def opens_when_it_waits(rank, gate):
    """Let the rank open the gate as soon as it waits for its background saves."""
    saves = rank.objects.worker._saves
    settle = type(saves).settle

    def open_and_settle():
        gate.touch()
        settle(saves)

    saves.settle = open_and_settle


async def on(workers, *args):
    """What each rank answers, while the loop goes on."""
    return await anyio.to_thread.run_sync(workers.answers, *args)


def staged(config, step) -> Path:
    return staged_path(config.checkpoint_folder, config.epoch, step) / "actor"


async def saves(log) -> list:
    """What was said of saves, in order."""
    events = [decode_envelope(entry.payload).event for entry in await log.read(limit=10_000)]
    return [event for event in events if isinstance(event, SaveStarted | SaveFinished | SaveFailed)]


async def announcement(log, kind, step):
    """The announcement of the type about the step's checkpoint."""
    with anyio.fail_after(PATIENCE):
        while True:
            for event in await announced(log, 1):
                if isinstance(event, kind) and (event.kind, event.step) == ("checkpoint", step):
                    return event
            await anyio.sleep(0.01)


async def test_training_goes_on_while_a_checkpoint_is_written_and_it_is_ready_when_all_is_on_disk(
    workers, config, log, tmp_path
):
    async with reducer_task(config.redis_url, config.run_id, tmp_path):
        await on(workers, train, config.run_id, 1)
        expected, _ = await on(workers, weights)
        workers.on_rank_1(before_it_writes, wait_for, tmp_path / "gate")
        assert await on(workers, call, "save_checkpoint", str(staged(config, 1)), 1) == [None] * 2
        await register_saves(config, 1, state_dicts=1, others=1)
        for seed in (2, 3):
            for metrics in await on(workers, train, config.run_id, seed):
                assert metrics["gradient_norm"] > 0
        changed, _ = await on(workers, weights)
        assert not identical(changed["model.norm.weight"], expected["model.norm.weight"])
        [begun] = await until(lambda: saves(log))
        assert isinstance(begun, SaveStarted), "rank 1 has not written its part"

        (tmp_path / "gate").touch()
        assert await on(workers, call, "wait_on_save_thread") == [None] * 2
        model, model_done, state, state_done = await saves(log)
        assert (model.save_id, state.save_id) == (model_done.save_id, state_done.save_id)
        assert (model.slot.kind, state.slot.kind) == ("state_dict", "checkpoint")
        assert isinstance(model_done, SaveFinished) and isinstance(state_done, SaveFinished)
        await announcement(log, StepReady, 1)
    folder = config.checkpoint_folder / "global_step_1" / "actor"
    for done, part in ((model_done, "model"), (state_done, "training")):
        files = [path for path in (folder / part).iterdir() if path.name not in REDUCER_FILES]
        assert done.bytes == sum(path.stat().st_size for path in files)
    manifest = read_manifest(folder.parent)
    manifest.check_sizes()
    manifest.check_digests()
    assert {"actor/model/.metadata", "actor/training/rank_1.pt"} <= manifest.sums.keys()
    workers(load, folder)
    at.assert_same(workers(weights)[1], expected)


async def test_saves_wait_for_the_checkpoint_under_way_and_so_does_the_end(
    workers, config, log, tmp_path
):
    for method, step in (("save_checkpoint", 1), ("save_state_dict", 2), ("save_checkpoint", 3)):
        workers(call, method, str(staged(config, step)), step)
        if method == "save_checkpoint":
            gate = tmp_path / f"gate-{step}"
            workers.on_rank_1(before_it_writes, wait_for, gate)
            workers.on_rank_1(opens_when_it_waits, gate)
    workers(call, "shutdown")
    events = await saves(log)
    assert [type(event) for event in events] == [SaveStarted, SaveFinished] * 5
    assert [event.slot.step for event in events[::2]] == [1, 1, 2, 3, 3]


async def test_what_fails_in_the_background_fails_the_save_and_the_step_can_be_saved_again(
    workers, config, log, tmp_path
):
    async with reducer_task(config.redis_url, config.run_id, tmp_path):
        workers.on_rank_1(before_it_writes, fail)
        await on(workers, call, "save_checkpoint", str(staged(config, 1)), 1)
        await register_saves(config, 1, state_dicts=1, others=1)
        await on(workers, train, config.run_id, 1)
        for answer in await on(workers, call, "wait_on_save_thread"):
            assert isinstance(answer, SaveError)
            assert "rank 1 could not write: no room for rank 1" in str(answer)
            assert len(answer.failures) == 2
        failed = [event for event in await saves(log) if isinstance(event, SaveFailed)]
        assert [failure.slot.kind for failure in failed] == ["state_dict", "checkpoint"]
        assert all("no room for rank 1" in failure.message for failure in failed)
        assert "no room for rank 1" in (await announcement(log, StepFailed, 1)).reason

        workers.on_rank_1(before_it_writes, nothing)
        await on(workers, call, "save_checkpoint", str(staged(config, 1)), 1)
        assert await on(workers, call, "wait_on_save_thread") == [None] * 2
        await announcement(log, StepReady, 1)


async def test_a_rank_killed_in_a_background_save_fails_it_and_the_log_says_why(
    workers, config, log, tmp_path
):
    async with reducer_task(config.redis_url, config.run_id, tmp_path):
        workers.on_rank_1(before_it_writes, die)
        await on(workers, call, "save_checkpoint", str(staged(config, 1)), 1)
        await register_saves(config, 1, state_dicts=1, others=1)
        own, gone = await on(workers, call, "wait_on_save_thread")
        assert isinstance(gone, ProcessLookupError)
        assert isinstance(own, SaveError)
        assert all(isinstance(failure, CollectiveBroken) for failure in own.failures)
        assert "a rank died or was too slow" in (await announcement(log, StepFailed, 1)).reason
