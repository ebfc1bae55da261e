"""A float32 trainer publishes in the dtype that explorers serve in: half the bytes, same proofs."""

from __future__ import annotations

from contextlib import asynccontextmanager, closing

import anyio.to_thread
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from tests.support.experiences import make_groups  # noqa: E402
from tests.support.pipeline import events_of, reducer_task, reports_accepted  # noqa: E402
from tests.support.tensors import identical  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from tests.support.weight_versions import ready  # noqa: E402
from tests.support.worker_ranks import WorkerRanks  # noqa: E402
from trinity_events import Synchronizer  # noqa: E402
from trinity_events.weights import model_digest  # noqa: E402
from trinity_schemas import VersionPartPublished, WeightsApplied  # noqa: E402
from trinity_workers.config.sections.sync import SyncConfig  # noqa: E402
from trinity_workers.config.train_config import TrainConfig  # noqa: E402
from trinity_workers.learning.policy import load_policy  # noqa: E402

SERVED = {"explorer": {"dtype": "bfloat16"}}


def train_step(worker, seed):
    of_megatron = getattr(worker, "get_megatron_global_info", None)
    replicas = of_megatron().dp_size if of_megatron else worker._config.trainer.rank_count
    worker.train_step(make_groups("r", seed)[worker.rank_info().dp_rank :: replicas])


def trained(worker):
    """The policy's full tensors, as it is trained."""
    return {name: tensor.clone() for name, tensor in worker._engine.get_per_tensor_param()}


def upload(worker, step):
    worker.upload_state_dict(step)
    getattr(worker._strategy, "wait", lambda: None)()  # a snapshot is sent in the background
    if worker._rank == 0:
        worker._synchronizer.commit(step)
        worker._synchronizer.flush()


def send(worker, step):
    if worker._rank == 0:
        worker.setup_weight_sync_group(1)
    worker.sync_weight_nccl(step)
    if worker._rank == 0:
        worker._synchronizer.commit(step)
        worker._synchronizer.flush()


def save(worker, folder, masters):
    worker.save_weights(str(folder), 1, name="huggingface_weights", masters=masters)
    worker.wait_on_save_thread()


@asynccontextmanager
async def workers(rank_processes, config):
    """The trainer's ranks, with a reducer beside."""
    async with reducer_task(config.redis_url, config.run_id):
        ranks = await anyio.to_thread.run_sync(WorkerRanks, rank_processes, config)

        async def ask(*args):
            return await anyio.to_thread.run_sync(ranks, *args)

        yield ask
        await anyio.to_thread.run_sync(ranks.close)


def explorer_of(config, **options):
    return closing(
        Synchronizer(
            config.run_id,
            0,
            redis_url=config.redis_url,
            weights_url=config.weights_url,
            role="explorer",
            **options,
        )
    )


def assert_serves(model, weights):
    """The model has the bits of these weights, rounded to bfloat16."""
    for name, parameter in model.named_parameters():
        assert identical(parameter.detach(), weights[name].bfloat16()), name


@pytest.mark.parametrize(
    ("engine", "form"), [("fsdp", "shards"), ("fsdp", "snapshot"), ("megatron", "shards")]
)
async def test_versions_and_deltas_are_published_as_they_are_served(
    rank_processes, make_config, log, engine, form
):
    if engine == "megatron":
        pytest.importorskip("megatron.core")
    config = make_config(
        trainer={"ranks": 2, "engine": engine, "warmup_steps": 0},
        sync={"publish": form, "full_every": 4, "timeout": PATIENCE},
        explorer={**SERVED["explorer"], "proof": "served"},
    )
    model, _ = load_policy(config.model_folder, config.served_dtype)
    async with workers(rank_processes, config) as ask:
        with explorer_of(config) as explorer:
            for step in (1, 2):
                weights, *_ = await ask(trained)
                await ask(upload, step)
                event = await ready(log, step)
                # Without a cast: it travels as it is served, and the digests are of what is served.
                await anyio.to_thread.run_sync(explorer.apply, model, event)
                assert_serves(model, weights)
                await ask(train_step, step)
            elements = sum(parameter.numel() for parameter in model.parameters())
            explorer.flush()
            await reports_accepted(log)
    published = [entry.event for entry in await events_of(log, VersionPartPublished)]
    full = sum(event.bytes for event in published if event.step == 1)
    assert 2 * elements <= full < 2.2 * elements, "two bytes an element, where the model has four"
    assert all(event.delta is not None for event in published if event.step == 2)
    applied = [entry.event for entry in await events_of(log, WeightsApplied)]
    assert [event.digest for event in applied] == [
        (await ready(log, step)).version_digest for step in (1, 2)
    ]


async def test_a_group_and_files_get_them_so_too_and_a_checkpoint_keeps_float32(
    rank_processes, make_config, log, tmp_path
):
    config = make_config(
        trainer={"ranks": 2, "warmup_steps": 0},
        sync={"method": "nccl", "timeout": PATIENCE},
        **SERVED,
    )
    model, _ = load_policy(config.model_folder, config.served_dtype)
    async with workers(rank_processes, config) as ask:
        with explorer_of(config, transport="collective", group_timeout=PATIENCE) as explorer:
            await anyio.to_thread.run_sync(explorer.join_weight_sync_group)
            weights, *_ = await ask(trained)
            await ask(send, 1)
            await anyio.to_thread.run_sync(explorer.apply, model, await ready(log, 1))
            assert_serves(model, weights)
            explorer.flush()
            await reports_accepted(log)
        for masters in (False, True):
            folder = tmp_path / config.run_id / ".staging" / f"masters-{masters}"
            await ask(save, folder, masters)
            saved = load_file(folder / "huggingface" / "model.safetensors")
            for name, tensor in saved.items():
                assert identical(tensor, weights[name] if masters else weights[name].bfloat16())
    [part] = [entry.event for entry in await events_of(log, VersionPartPublished)]
    assert part.bytes < 2.2 * sum(parameter.numel() for parameter in model.parameters())
    # What the group brought is what a rollout engine of the same files serves.
    served, _ = load_policy(config.model_folder, "bfloat16")
    assert model_digest(served) == model_digest(model)


def test_the_published_dtype_is_the_served_one_and_never_a_wider_one_than_the_trainers():
    def published(trained, served=None, dtype=None):
        config = TrainConfig(sync=SyncConfig(dtype=dtype))
        return (
            config.replaced("model", dtype=trained).replaced("explorer", dtype=served)
        ).published_dtype

    assert published("float32") == "float32"
    assert published("float32", served="bfloat16") == "bfloat16"
    assert published("float32", served="bfloat16", dtype="float32") == "float32"
    assert published("float32", dtype="bfloat16") == "bfloat16"
    assert published("bfloat16") == published("bfloat16", served="float32") == "bfloat16"
