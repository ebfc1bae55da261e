"""veRL's Megatron engine as the trainer's engine, on a double of what it needs a GPU for."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import anyio.to_thread
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from safetensors.torch import load_file

from tests.support.errors import raises
from tests.support.experiences import make_groups
from tests.support.fsdp_runs import DIVIDED, ready
from tests.support.tensors import assert_equal, identical
from tests.support.waits import PATIENCE
from tests.verl.gpu_double import gpu_double
from tests.verl.test_megatron_engine import children_allowed
from trinity_events import Synchronizer
from trinity_events.checkpoints.verification import CheckpointDamaged
from trinity_events.coordinator import staged_path
from trinity_workers.conversion.convert import convert
from trinity_workers.engines.megatron.checkpoint_errors import ForeignCheckpoint
from trinity_workers.engines.verl.errors import VerlMegatronRefused
from trinity_workers.trainer.workers.megatron import MegatronTrainWorker
from trinity_workers.trainer.workers.verl_megatron import VerlMegatronTrainWorker

try:
    installed = Version(version("verl"))
except PackageNotFoundError:
    installed = Version("0")

pytestmark = [
    pytest.mark.skipif(installed < Version("0.9.1"), reason="it drives veRL from 0.9.1 on"),
    pytest.mark.megatron,
    pytest.mark.heavy,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # veRL's, mbridge's and Megatron's
]


def make_worker(rank, config, doubled):
    """Make a worker; what veRL's engine needs a GPU for is doubled until it is shut down."""
    rank.objects.double = ExitStack()
    kind = MegatronTrainWorker
    if config.trainer.engine == "verl-megatron":
        kind = VerlMegatronTrainWorker
        if doubled:
            rank.objects.double.enter_context(gpu_double())
    rank.objects.worker = kind(config, rank.number)
    return rank.objects.worker.address() if rank.number == 0 else None


def set_up(rank, host, port):
    rank.objects.worker.setup(host, port)


def shut_down(rank):
    rank.objects.worker.shutdown()
    rank.objects.double.close()


def train(rank, groups):
    """Take a step on the share of the rank's replica; return its metrics and the weights."""
    worker = rank.objects.worker
    place, sizes = worker.rank_info(), worker.get_megatron_global_info()
    metrics = worker.train_step(groups[place.dp_rank :: sizes.dp_size])
    return metrics, weights(rank)


def weights(rank):
    stream = rank.objects.worker._engine.get_per_tensor_param()
    return {name: tensor.clone() for name, tensor in stream}


def call(rank, method, *args):
    return getattr(rank.objects.worker, method)(*args)


def publish(rank, step):
    worker = rank.objects.worker
    worker.upload_state_dict(step)
    worker._synchronizer.flush()


@pytest.fixture
def workers(verl_processes, make_config):
    """Makes workers on an engine; returns a function that lets all of them do something."""
    verl_processes.leave()
    worlds = []

    def end():
        if worlds:
            verl_processes.call(range(worlds.pop()), shut_down)

    def make(world, engine="verl-megatron", algorithm=None, sync=None, **settings):
        config = make_config(
            trainer={"ranks": world, "warmup_steps": 0, "engine": engine} | settings,
            model={"dtype": "bfloat16"},
            sync={"timeout": PATIENCE} | (sync or {}),
            algorithm=algorithm or {},
            steps=9,
        )
        end()
        host, port = verl_processes.call(range(world), make_worker, config, True)[0]
        worlds.append(world)
        verl_processes.call(range(world), set_up, host, port)
        return partial(verl_processes.call, range(world))

    yield make
    end()


def with_root_of_squares(metrics):
    """Return the metrics with the root mean square of the ratios in the place of chi-squared.

    The mean of (pi/mu)^2 - 1 takes twice the ratios' deviation and relates it to a small rest:
    in a second step, our engine's layouts differ in it by a fifth among themselves.
    """
    name = "rollout_corr/chi2_token"
    if name not in metrics:
        return metrics
    return metrics | {name: math.sqrt(1.0 + metrics[name])}


LAYOUTS = {
    "one rank": (1, {"micro_batch_rows": 3}),
    "tensors": (2, {"tensor_parallel": 2, "recompute": True}),
    "pipeline": (2, {"pipeline_parallel": 2, "micro_batch_tokens": 40}),
    "replicas": (2, {"tensor_parallel": 1, "micro_batch_tokens": 40}),
}


@pytest.mark.parametrize("algorithm", [{}, DIVIDED], ids=["one update", "several"])
@pytest.mark.parametrize(("world", "settings"), LAYOUTS.values(), ids=LAYOUTS)
def test_training_on_verls_engine_is_training_on_ours(
    workers, run_id, policy_folder, world, settings, algorithm
):
    steps = [make_groups(run_id, seed) for seed in (1, 2)]
    results = {}
    for engine in ("megatron", "verl-megatron"):
        ranks = workers(world, engine, algorithm, schedule="linear", learning_rate=5e-3, **settings)
        results[engine] = [ranks(train, groups) for groups in steps]
    begun = load_file(policy_folder / "model.safetensors")
    for ours, theirs in zip(results["megatron"], results["verl-megatron"], strict=True):
        for (metrics, trained), (expected, expected_weights) in zip(theirs, ours, strict=True):
            # Both compute in bfloat16, and round differently: where a gradient is about 0, AdamW's
            # update is of either sign.
            assert with_root_of_squares(metrics) == pytest.approx(
                with_root_of_squares(expected), abs=0.03, rel=0.05
            )
            update, expected_update = (
                torch.cat([(now[name] - begun[name]).flatten() for name in sorted(now)])
                for now in (trained, expected_weights)
            )
            assert torch.cosine_similarity(update, expected_update, dim=0) > 0.9
            torch.testing.assert_close(update.norm(), expected_update.norm(), atol=0, rtol=0.05)


@pytest.mark.parametrize("form", ["full", "shards"])
@pytest.mark.parametrize(
    "settings", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=["tensors", "pipeline"]
)
async def test_what_it_publishes_is_what_it_trained(
    workers, run_id, log, committer, redis_url, weights_url, settings, form
):
    in_thread = anyio.to_thread.run_sync
    ranks = await in_thread(partial(workers, 2, sync={"publish": form}, **settings))
    (_, trained), _ = await in_thread(ranks, train, make_groups(run_id, 1))
    await in_thread(ranks, publish, 1)
    committer.commit(1)
    event = await ready(log, "weights", 1)
    explorer = Synchronizer(
        run_id, 0, redis_url=redis_url, weights_url=weights_url, role="explorer"
    )
    with explorer.pull(event) as version:
        assert_equal(dict(sorted(version.tensors())), dict(sorted(trained.items())))
    explorer.close()


def save(rank, folder, step):
    """Save a checkpoint in the background, train on before it is waited for."""
    worker = rank.objects.worker
    worker.save_checkpoint(str(folder), step)
    trained = train(rank, make_groups("r", 3))
    worker.wait_on_save_thread()
    return trained


def load(rank, folder):
    """Load a checkpoint; return the weights and the optimizer steps after it."""
    rank.objects.worker.load_checkpoint(str(folder))
    return weights(rank), rank.objects.worker._engine.steps


async def test_a_checkpoint_is_written_in_the_background_verified_and_continued_at_any_layout(
    workers, run_id, publisher, tmp_path
):
    in_thread = anyio.to_thread.run_sync
    folder = staged_path(tmp_path / run_id, publisher.epoch, 1) / "actor"
    workers = partial(workers, learning_rate=1e-2)
    ranks = await in_thread(partial(workers, 2, tensor_parallel=2))
    (_, trained), _ = await in_thread(ranks, train, make_groups(run_id, 1))
    (metrics, after), _ = await in_thread(ranks, save, folder, 1)
    assert not identical(after["model.norm.weight"], trained["model.norm.weight"])

    fresh = await in_thread(partial(workers, 2, tensor_parallel=2))
    for loaded, steps in await in_thread(fresh, load, folder):
        assert steps == 1
        assert_equal(loaded, trained)
    for again, continued in await in_thread(fresh, train, make_groups("r", 3)):
        assert again == metrics
        assert_equal(continued, after)

    # At other layouts.
    other = await in_thread(partial(workers, 2, pipeline_parallel=2))
    (loaded, steps), _ = await in_thread(other, load, folder)
    assert steps == 1
    assert_equal(dict(sorted(loaded.items())), dict(sorted(trained.items())))
    alone = await in_thread(partial(workers, 1))
    [(loaded, steps)] = await in_thread(alone, load, folder)
    assert_equal(dict(sorted(loaded.items())), dict(sorted(trained.items())))
    [(again, _)] = await in_thread(alone, train, make_groups("r", 3))
    assert again == pytest.approx(metrics, abs=0.03, rel=0.05)

    converted = tmp_path / "converted"
    convert(folder, converted)
    tensors = load_file(converted / "model.safetensors")
    assert_equal(dict(sorted(tensors.items())), dict(sorted(trained.items())))


def save_now(rank, folder):
    """Save by the engine itself, before the call returns."""
    rank.objects.worker._engine.save_checkpoint(str(folder))


def test_a_damaged_checkpoint_is_not_loaded(workers, run_id, tmp_path):
    ranks = workers(1)
    ranks(train, make_groups(run_id, 1))
    ranks(save_now, tmp_path / "actor")
    [file, *_] = sorted((tmp_path / "actor" / "training").glob("*.distcp"))
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    with raises(CheckpointDamaged, path=file):
        ranks(load, tmp_path / "actor")


def save_by_verl(rank, folder):
    """Let veRL's own manager save, whose files are pickles in part."""
    engine = rank.objects.worker._engine.verl
    with children_allowed():
        engine.save_checkpoint(str(folder), global_step=1)


def test_what_verl_itself_saved_is_refused_as_it_would_be_unpickled(workers, run_id, tmp_path):
    ranks = workers(1)
    ranks(train, make_groups(run_id, 1))
    ranks(save_by_verl, tmp_path / "theirs")
    with raises(ForeignCheckpoint, path=tmp_path / "theirs" / "model", fault="incomplete"):
        ranks(load, tmp_path / "theirs")


def test_without_a_gpu_a_rank_is_refused_with_what_is_missing(verl_processes, make_config):
    config = make_config(
        trainer={"ranks": 1, "engine": "verl-megatron"},
        model={"dtype": "bfloat16"},
        sync={"timeout": PATIENCE},
    )
    verl_processes.leave()
    [place] = verl_processes.call([0], make_worker, config, False)
    with raises(VerlMegatronRefused, fault="device", value="CPU"):
        verl_processes.call([0], set_up, *place)
    verl_processes.call([0], end_group)


def end_group(rank):
    dist.destroy_process_group()
