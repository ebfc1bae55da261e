"""veRL's FSDP engine as the trainer's engine: it learns, saves and publishes as ours does."""

from __future__ import annotations

from functools import partial

import anyio
import anyio.to_thread
import pytest
import torch

from tests.support.experiences import make_groups
from tests.support.fsdp_runs import DIVIDED, ready
from tests.support.pipeline import reducer_task
from tests.support.tensors import assert_equal, identical
from tests.support.waits import PATIENCE, until
from trinity_events import Synchronizer
from trinity_events.coordinator import staged_path
from trinity_workers.trainer import get_trainer_wrapper
from trinity_workers.trainer.workers.fsdp import TrainWorker
from trinity_workers.trainer.workers.verl import VerlTrainWorker

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(600),  # its own deadlines are shorter, and say what is missing
]


def make_worker(rank, config):
    kind = VerlTrainWorker if config.trainer.engine == "verl" else TrainWorker
    rank.objects.worker = kind(config, rank.number)
    return rank.objects.worker.address() if rank.number == 0 else None


def set_up(rank, host, port):
    rank.objects.worker.setup(host, port)


def train(rank, groups):
    """Take a step; return its metrics and the full parameters after it."""
    worker = rank.objects.worker
    metrics = worker.train_step(groups[rank.number :: 2])
    return metrics, {name: value.clone() for name, value in worker._engine.master_params()}


def call(rank, method, *args):
    return getattr(rank.objects.worker, method)(*args)


def loaded_by_verl(rank, folder):
    """Let veRL's own loader read a checkpoint of ours; return what is there then."""
    engine = rank.objects.worker._engine
    engine.verl.load_checkpoint(str(folder), del_local_after_load=False)
    return engine.steps, {name: value.clone() for name, value in engine.master_params()}


def flushed(rank):
    rank.objects.worker._synchronizer.flush()


@pytest.fixture
def workers(verl_processes, make_config):
    """Makes two ranks' workers on an engine; returns a function that lets both do something."""
    verl_processes.leave()
    set_up_ones = []

    def all_ranks(function, *args):
        return verl_processes.call(range(2), function, *args)

    def make(engine="verl", algorithm=None, **settings):
        config = make_config(
            trainer={"ranks": 2, "warmup_steps": 0, "engine": engine} | settings,
            sync={"timeout": PATIENCE},
            algorithm=algorithm or {},
            steps=9,
        )
        if set_up_ones:
            all_ranks(call, "shutdown")
        set_up_ones.append(engine)
        host, port = all_ranks(make_worker, config)[0]
        all_ranks(set_up, host, port)
        return all_ranks

    yield make
    if set_up_ones:
        all_ranks(call, "shutdown")


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [({}, {}), (DIVIDED, {"schedule": "cosine", "micro_batch_tokens": 40})],
    ids=["one update", "several"],
)
def test_training_on_verls_engine_is_training_on_ours(workers, run_id, algorithm, settings):
    steps = [make_groups(run_id, seed) for seed in (1, 2)]
    results = {}
    for engine in ("fsdp", "verl"):
        ranks = workers(engine, algorithm, **settings)
        results[engine] = [ranks(train, groups) for groups in steps]
    for ours, theirs in zip(results["fsdp"], results["verl"], strict=True):
        for (metrics, weights), (expected, expected_weights) in zip(theirs, ours, strict=True):
            assert metrics == pytest.approx(expected, abs=1e-3, rel=1e-3)
            assert sorted(weights) == sorted(expected_weights)
            for name, value in weights.items():
                torch.testing.assert_close(value, expected_weights[name], atol=5e-4, rtol=0)


async def test_what_it_publishes_and_saves_is_what_it_trained_and_it_goes_on_from_there(
    workers, run_id, log, committer, publisher, redis_url, weights_url, tmp_path
):
    groups = make_groups(run_id, 1)
    ranks = workers()
    (_, trained), _ = await anyio.to_thread.run_sync(partial(ranks, train, groups))
    for method in ("upload_state_dict", "wait_on_save_thread"):
        await anyio.to_thread.run_sync(
            partial(ranks, call, method, *([1] if method == "upload_state_dict" else []))
        )
    await anyio.to_thread.run_sync(partial(ranks, flushed))
    committer.commit(1)
    event = await ready(log, "weights", 1)
    explorer = Synchronizer(
        run_id, 0, redis_url=redis_url, weights_url=weights_url, role="explorer"
    )
    with explorer.pull(event) as version:
        assert_equal(dict(version.tensors()), trained)
    explorer.close()

    folder = staged_path(tmp_path / run_id, publisher.epoch, 1) / "actor"
    await anyio.to_thread.run_sync(partial(ranks, call, "save_checkpoint", str(folder), 1))
    await anyio.to_thread.run_sync(partial(ranks, call, "wait_on_save_thread"))
    names = {f"{what}_world_size_2_rank_{rank}.pt" for what in FILES for rank in range(2)}
    assert names <= {file.name for file in folder.iterdir()}

    (metrics, after), _ = await anyio.to_thread.run_sync(partial(ranks, train, groups))
    assert not identical(after["model.norm.weight"], trained["model.norm.weight"])
    for steps, weights in await anyio.to_thread.run_sync(partial(ranks, loaded_by_verl, folder)):
        assert steps == 1
        assert_equal(weights, trained)
    assert await again(ranks, groups) == (metrics, after)
    fresh = await anyio.to_thread.run_sync(workers)
    await anyio.to_thread.run_sync(partial(fresh, call, "load_checkpoint", str(folder)))
    assert await again(fresh, groups) == (metrics, after)


FILES = ("model", "optim", "extra_state")


class Weights(dict):
    """Weights that are equal if they are bit for bit."""

    def __eq__(self, other):
        return self.keys() == other.keys() and all(
            identical(value, other[name]) for name, value in self.items()
        )

    __hash__ = None


async def again(ranks, groups):
    """Take the step once more; return its metrics and weights, which compare by their bits."""
    (metrics, weights), _ = await anyio.to_thread.run_sync(partial(ranks, train, groups))
    return metrics, Weights(weights)


@pytest.mark.ray
async def test_the_wrapper_trains_sends_and_saves_on_verls_engine(
    make_config, run_id, log, redis_url, tmp_path
):
    import ray

    config = make_config(
        trainer={"ranks": 2, "engine": "verl"},
        sync={"method": "nccl", "timeout": PATIENCE},
        checkpoints={"interval": 1},
    )
    explorer = Synchronizer(
        run_id, 0, redis_url=redis_url, weights_url=config.weights_url, role="explorer"
    )
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    wrapper = get_trainer_wrapper(config)
    try:
        explorer.join_weight_sync_group()
        async with reducer_task(redis_url, run_id, tmp_path):
            with anyio.fail_after(3 * PATIENCE):
                await wrapper.prepare()
                metrics = await wrapper.train_step(make_groups(run_id, 1))
                assert metrics["gradient_norm"] > 0 and wrapper.train_step_num == 1
                _, _, tensors = await wrapper.get_weight_sync_info()
                await wrapper.sync_weight_nccl()
                event = await ready(log, "weights", 1)

                def pull():
                    with explorer.pull(event) as version:
                        return [
                            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                            for name, tensor in version.tensors()
                        ]

                assert await anyio.to_thread.run_sync(pull) == tensors
                await wrapper.teardown_weight_sync_group()
                await wrapper.save_checkpoint(block_until_saved=True)
                saved = config.folder_of(1)
                await until(saved.is_dir)
        names = {f"{what}_world_size_2_rank_{rank}.pt" for what in FILES for rank in range(2)}
        assert names <= {file.name for file in (saved / "actor").iterdir()}
        assert (saved / "actor" / "huggingface" / "tokenizer.json").is_file()
    finally:
        explorer.close()
        await wrapper.shutdown()
        ray.shutdown()
