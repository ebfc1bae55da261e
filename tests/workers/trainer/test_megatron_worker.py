"""The trainer's ranks on Megatron: where they are, and that they train as FSDP's do."""

from __future__ import annotations

import contextlib
import os
import signal

import anyio
import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch.distributed as dist  # noqa: E402

from tests.support.experiences import make_groups  # noqa: E402
from tests.support.fsdp_runs import DIVIDED  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_schemas import RunClosed, decode_envelope  # noqa: E402
from trinity_workers.algorithms.rules import read_settings  # noqa: E402
from trinity_workers.engines.megatron import ParallelLayout  # noqa: E402
from trinity_workers.launch.lifecycle import closing  # noqa: E402
from trinity_workers.learning.policy import create_policy  # noqa: E402
from trinity_workers.trainer.backends import get_trainer_wrapper  # noqa: E402
from trinity_workers.trainer.workers.fsdp import TrainWorker  # noqa: E402
from trinity_workers.trainer.workers.megatron import MegatronTrainWorker  # noqa: E402
from trinity_workers.worker_group.group import WorkerDied  # noqa: E402
from trinity_workers.worker_group.megatron import MegatronWorker  # noqa: E402
from trinity_workers.worker_group.ranks import (  # noqa: E402
    DistGlobalInfo,
    DistRankInfo,
    rank_table,
)

pytestmark = [pytest.mark.megatron, pytest.mark.heavy]


def infos(rank):
    worker = MegatronWorker()
    return worker.get_megatron_global_info(), worker.get_megatron_rank_info()


def test_ranks_know_their_places_in_megatrons_order(engine_ranks):
    table = engine_ranks("qwen2", 4, ParallelLayout(tensor=2, pipeline=2))(infos)
    assert {info for info, _ in table} == {DistGlobalInfo(2, 1, 2, 1)}
    assert [rank for _, rank in table] == [
        DistRankInfo(tp_rank=rank % 2, dp_rank=0, pp_rank=rank // 2, cp_rank=0) for rank in range(4)
    ]
    table = engine_ranks("qwen2", 4, ParallelLayout(tensor=2))(infos)
    assert [rank for _, rank in table] == rank_table(table[0][0]), "the table that is tested"
    assert [rank.dp_rank for _, rank in table] == [0, 0, 1, 1]


def make_worker(rank, config):
    kind = MegatronTrainWorker if config.trainer.engine == "megatron" else TrainWorker
    rank.objects.worker = kind(config, rank.number)
    return rank.objects.worker.address() if rank.number == 0 else None


def train(rank, host, port, steps):
    worker = rank.objects.worker
    worker.setup(host, port)
    count = dist.get_world_size()
    if isinstance(worker, MegatronWorker):
        count = worker.get_megatron_global_info().dp_size
    share = worker.rank_info().dp_rank
    metrics = [worker.train_step(groups[share::count]) for groups in steps]
    weights = {name: value.clone() for name, value in worker._engine.get_per_tensor_param()}
    worker.shutdown()
    return metrics, weights


@pytest.fixture
def trained(rank_processes, make_config):
    """What workers of so many ranks come to from the same start, on the same groups."""
    rank_processes.leave()

    def run(world: int, steps, dtype="float32", algorithm=None, **settings):
        config = make_config(
            trainer={"ranks": world, "warmup_steps": 0} | settings,
            sync={"timeout": PATIENCE},
            model={"dtype": dtype},
            algorithm=algorithm or {},
            steps=len(steps),
        )
        rank_processes.start(world)
        place, *_ = rank_processes.call(range(world), make_worker, config)
        return rank_processes.call(range(world), train, *place, steps)

    return run


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        pytest.param(2, {}, marks=pytest.mark.nightly),
        (2, {"pipeline_parallel": 2, "recompute": True}),
        (4, {"tensor_parallel": 2, "distributed_optimizer": True}),
        pytest.param(2, {"context_parallel": 2}, marks=pytest.mark.nightly),
        (4, {"context_parallel": 2, "sequence_parallel": True, "distributed_optimizer": True}),
    ],
)
def test_training_on_megatron_is_training_on_fsdp(trained, run_id, world, settings):
    steps = [make_groups(run_id, seed) for seed in (1, 2, 3)]
    [(expected, expected_weights)] = trained(1, steps)
    for metrics, weights in trained(world, steps, engine="megatron", **settings):
        for mine, theirs in zip(metrics, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4, rel=1e-4)
        assert sorted(weights) == sorted(expected_weights)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected_weights[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        pytest.param(1, {"micro_batch_rows": 3}, marks=pytest.mark.nightly),
        (2, {"pipeline_parallel": 2, "micro_batch_tokens": 40}),
        (4, {"tensor_parallel": 2, "micro_batch_tokens": 30}),
    ],
    ids=["one rank", "pipeline", "replicas of two ranks"],
)
def test_several_updates_with_a_reference_on_megatron_are_those_on_fsdp(
    trained, run_id, world, settings
):
    steps = [make_groups(run_id, seed) for seed in (1, 2)]
    algorithm, schedule = DIVIDED, {"schedule": "cosine"}
    replicas = 2 if world == 4 else 1  # a mini-batch has rows of each
    (expected, expected_weights), *_ = trained(replicas, steps, algorithm=algorithm, **schedule)
    results = trained(world, steps, algorithm=algorithm, engine="megatron", **schedule, **settings)
    for metrics, weights in results:
        for mine, theirs in zip(metrics, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3, rel=1e-3)
        assert metrics[-1]["learning_rate"] < metrics[0]["learning_rate"]
        for name, value in weights.items():
            torch.testing.assert_close(value, expected_weights[name], atol=5e-4, rtol=0)


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    """A Hugging Face folder of a policy with other weights than the one that learns."""
    folder = tmp_path_factory.mktemp("teacher")
    create_policy(folder, seed=7)
    return folder


def test_a_teacher_on_megatron_teaches_what_it_teaches_on_fsdp(trained, run_id, teacher_folder):
    steps = [make_groups(run_id, seed) for seed in (1, 2)]
    algorithm_settings = {"preset": "distillation", "teacher": {"path": str(teacher_folder)}}
    algorithm = msgspec.to_builtins(read_settings(algorithm_settings))
    [(expected, expected_weights)] = trained(1, steps, algorithm=algorithm)
    for metrics, weights in trained(2, steps, algorithm=algorithm, engine="megatron"):
        for mine, theirs in zip(metrics, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3, rel=1e-3)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected_weights[name], atol=5e-4, rtol=0)


@pytest.mark.parametrize(
    "parallel",
    ["tensor_parallel", pytest.param("pipeline_parallel", marks=pytest.mark.nightly)],
)
def test_a_policy_in_bfloat16_learns_as_one_in_float32_and_is_published_so(
    trained, run_id, parallel
):
    steps = [make_groups(run_id, seed) for seed in (1, 2, 3)]
    [(expected, expected_weights)] = trained(1, steps)
    settings = {"engine": "megatron", parallel: 2}
    for metrics, weights in trained(2, steps, dtype="bfloat16", **settings):
        for mine, theirs in zip(metrics, expected, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=0.03)
        assert {value.dtype for value in weights.values()} == {torch.bfloat16}
        for name, value in weights.items():
            torch.testing.assert_close(value.float(), expected_weights[name], atol=0.01, rtol=0.01)


def dies_in_its_next_gradient(worker):
    """Let a rank die in the middle of a training step, when all have begun on it."""

    def learn(batch, step):
        os.kill(os.getpid(), signal.SIGKILL)

    worker._worker._step.learn = learn


@pytest.mark.ray
async def test_a_rank_killed_in_a_training_step_is_what_the_closing_event_names(
    client, log, run_id, make_config
):
    import ray

    config = make_config(trainer={"engine": "megatron", "ranks": 2}, sync={"timeout": PATIENCE})
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        fleet = get_trainer_wrapper(config)
        await fleet.prepare()
        with anyio.fail_after(PATIENCE):
            await fleet.train_step(make_groups(run_id, 1))
            await fleet._workers.workers[1].__ray_call__.remote(dies_in_its_next_gradient)
            with pytest.raises(WorkerDied):
                async with closing(client, config):
                    await fleet.train_step(make_groups(run_id, 2))
    finally:
        with contextlib.suppress(Exception):
            await fleet.shutdown()
        ray.shutdown()
    events = [decode_envelope(entry.payload).event for entry in await log.read(limit=1000)]
    [closed] = [event for event in events if isinstance(event, RunClosed)]
    assert closed.reason == "failed"
    error = closed.error or ""
    assert error.startswith("WorkerDied: actor-1 (process ")
    assert f"of run {run_id} died in train_step at step 2: killed by SIGKILL" in error
