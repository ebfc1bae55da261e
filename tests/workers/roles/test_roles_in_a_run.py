"""Roles in a run, in processes of their own: they broadcast, save in the background, and load."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ray")

import torch.distributed.checkpoint as dcp  # noqa: E402

from tests.support.batches import make_batch  # noqa: E402
from tests.support.fsdp_runs import ready  # noqa: E402
from tests.support.pipeline import reducer_task, register_saves  # noqa: E402
from tests.support.tensors import assert_equal, identical  # noqa: E402
from tests.support.waits import PATIENCE, until, wait_until  # noqa: E402
from trinity_events import Synchronizer  # noqa: E402
from trinity_events.checkpoints.manifest import listed_sums  # noqa: E402
from trinity_events.coordinator import staged_path  # noqa: E402
from trinity_schemas import Sampling, StepRef  # noqa: E402
from trinity_workers.algorithms.presets import preset_values  # noqa: E402
from trinity_workers.roles import ActorRolloutRefWorker, CriticWorker  # noqa: E402
from trinity_workers.rollout_engines.base import GenerationRequest  # noqa: E402
from trinity_workers.rollout_engines.huggingface import HuggingFaceEngine  # noqa: E402

RANKS = 2
SAVES = {"fsdp": (RANKS, 3 * RANKS), "megatron": (1, 3)}
"""Saves of a step in all, of the policy's weights and of the rest: training state and critic."""
FILES = {
    "fsdp": {
        f"{role}/{part}_world_size_2_rank_{rank}.pt"
        for role in ("actor", "critic")
        for part in ("model", "optim")
        for rank in range(RANKS)
    },
    "megatron": {
        f"{role}/{part}/metadata.json"
        for role in ("actor", "critic")
        for part in ("model", "training")
    },
}
LAYOUTS = [
    pytest.param("fsdp", 1, id="fsdp"),
    pytest.param("fsdp", RANKS, id="fsdp, shared layers"),
    pytest.param("megatron", RANKS, marks=pytest.mark.megatron, id="megatron"),
]


def make_roles(rank, config):
    rank.objects.roles = {
        "actor": ActorRolloutRefWorker(config, rank.number, role="actor"),
        "rollout": ActorRolloutRefWorker(config, rank.number, role="rollout"),
        "critic": CriticWorker(config, rank.number),
    }
    return rank.objects.roles["actor"].address() if rank.number == 0 else None


def begin(rank, host, port):
    rank.objects.roles["actor"].join(host, port)
    for role in rank.objects.roles.values():
        role.init_model()


def call(rank, role, method, *args):
    return getattr(rank.objects.roles[role], method)(*args)


def train(rank):
    """Take a step of policy and critic on a batch; return the policy's metrics."""
    batch = make_batch([3, 1, 4, 2], groups=[1, 1, 2, 2])
    call(rank, "critic", "update_critic", batch)
    return call(rank, "actor", "update_actor", batch)


def engine(rank, role):
    models = rank.objects.roles[role]._step.models
    return models.critic if role == "critic" else models.policy


def weights(rank, role):
    return {name: tensor.clone() for name, tensor in engine(rank, role).get_per_tensor_param()}


def optimizers(rank):
    return {role: engine(rank, role).optimizer is not None for role in rank.objects.roles}


def generate(rank, requests, *, deterministic):
    """Return this rank's answers, and the ordinals of those that it generated itself."""
    own, generate_batch = [], HuggingFaceEngine._generate_batch

    def count(engine, batch, must_end):
        own.extend(request.ordinal for request in batch)
        return generate_batch(engine, batch, must_end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HuggingFaceEngine, "_generate_batch", count)
        if deterministic:
            rank.objects.roles["rollout"]._rollouts._engine.deterministic = True
        return call(rank, "rollout", "generate_sequences", requests), own


def leave(rank):
    for role in ("critic", "rollout", "actor"):
        worker = rank.objects.roles[role]
        if role != "actor":  # the group of ranks is one
            worker._worker and worker._worker.close()
        else:
            worker.leave()


@pytest.fixture
def start(rank_processes, make_config):
    """Starts the roles of an engine on two ranks; returns a function that calls all ranks."""
    rank_processes.leave()
    started = []

    def on_all(function, *args):
        return rank_processes.call(range(RANKS), function, *args)

    def start(name, tensor=RANKS):
        config = make_config(
            algorithm={**preset_values("ppo"), "critic": {"use": True}},
            trainer={
                **{"engine": name, "ranks": RANKS, "warmup_steps": 0},
                "tensor_parallel": tensor,
            },
            sync={"method": "nccl", "timeout": PATIENCE},
        )
        rank_processes.start(RANKS)
        place, *_ = on_all(make_roles, config)
        on_all(begin, *place)
        started.append(name)
        return config, on_all

    yield start
    if started:
        on_all(leave)


@pytest.mark.parametrize(("name", "tensor"), LAYOUTS)
async def test_roles_broadcast_and_save_a_step_that_is_ready_and_roles_load_it(
    start, rank_processes, log, tmp_path, name, tensor
):
    in_thread = anyio.to_thread.run_sync
    config, on_all = await in_thread(start, name, tensor)
    assert on_all(optimizers) == [{"actor": True, "rollout": False, "critic": True}] * RANKS
    urls = {"redis_url": config.redis_url, "weights_url": config.weights_url}
    explorer = Synchronizer(config.run_id, 0, role="explorer", **urls)
    committer = Synchronizer(config.run_id, config.epoch, **urls)
    try:
        async with reducer_task(config.redis_url, config.run_id, tmp_path):
            (metrics, _) = await in_thread(on_all, train)
            assert metrics["actor/grad_norm"] > 0
            trained, _ = await in_thread(on_all, weights, "actor")
            values, _ = await in_thread(on_all, weights, "critic")

            await in_thread(explorer.join_weight_sync_group)
            [joined] = await in_thread(
                rank_processes.call, [0], call, "actor", "setup_weight_sync_group", 1, PATIENCE
            )
            assert len(joined) == 1
            await in_thread(on_all, call, "actor", "sync_weight_nccl", 1)
            committer.commit(1)
            version = await ready(log, "weights", 1)

            def pull():
                with explorer.pull(version) as pulled:
                    return {key: tensor.clone() for key, tensor in pulled.tensors()}

            assert_equal(await in_thread(pull), trained)

            folder = staged_path(config.checkpoint_folder, config.epoch, 1) / "actor"
            for role in ("actor", "critic"):
                await in_thread(on_all, call, role, "save_checkpoint", str(folder), 1)
            await in_thread(on_all, train)
            for role in ("actor", "critic"):
                await in_thread(on_all, call, role, "wait_on_save_thread")
            state_dicts, others = SAVES[name]
            await register_saves(config, 1, state_dicts=state_dicts, others=others)
            await ready(log, "checkpoint", 1)
            saved = config.folder_of(1)
            await until(saved.is_dir)
        assert FILES[name] <= listed_sums(saved).keys()

        changed, _ = await in_thread(on_all, weights, "actor")
        assert not identical(changed["model.norm.weight"], trained["model.norm.weight"])
        for role in ("actor", "critic", "rollout"):
            await in_thread(on_all, call, role, "load_checkpoint", str(saved / "actor"))
            expected = values if role == "critic" else trained
            for loaded in await in_thread(on_all, weights, role):
                assert_equal(loaded, expected)

        requests = [
            GenerationRequest(
                tokens=[5, 6, 7, ordinal],
                sampling=Sampling(max_new_tokens=5, temperature=0.0),
                ordinal=ordinal,
                sample=sample,
            )
            for ordinal in range(3)
            for sample in range(2)
        ]
        for deterministic in (False, True) if name == "fsdp" else (False,):
            generating = partial(generate, requests=requests, deterministic=deterministic)
            (answers, first), (others, second) = await in_thread(on_all, generating)
            assert answers == others
            assert len(answers) == len(requests)
            for answer in answers:
                assert [version for version, _ in answer.versions] == [StepRef(config.epoch, 1)]
            if name == "fsdp":  # each answer is generated once, by one of the ranks
                assert sorted(first + second) == [0, 0, 1, 1, 2, 2]
                assert sorted(first) == ([0, 0, 2, 2] if deterministic else [0, 1, 2])
    finally:
        explorer.close()
        committer.close()


def hold_writes(rank, gate):
    """Let a rank write its tensors only once the gate is there, and open it when it waits."""
    real, worker = dcp.FileSystemWriter.write_data, rank.objects.roles["critic"]._in_run
    settle = worker._saves.settle

    def write(self, plan, planner):
        wait_until(Path(gate).exists, "the gate was not opened")
        return real(self, plan, planner)

    def open_gate():
        Path(gate).touch()
        settle()

    dcp.FileSystemWriter.write_data, worker._saves.settle = write, open_gate


@pytest.mark.megatron
def test_a_save_of_the_critics_role_waits_for_the_one_under_way(start, tmp_path):
    _, on_all = start("megatron")
    on_all(hold_writes, str(tmp_path / "gate"))
    on_all(call, "critic", "save_checkpoint", str(tmp_path / "1" / "actor"), 1)
    (tmp_path / "gate").unlink(missing_ok=True)
    on_all(call, "critic", "save_checkpoint", str(tmp_path / "2" / "actor"), 2)
    assert (tmp_path / "gate").exists(), "the second save did not wait for the first"
    on_all(call, "critic", "wait_on_save_thread")
    for step in (1, 2):
        assert (tmp_path / str(step) / "critic" / "training" / "metadata.json").is_file()
