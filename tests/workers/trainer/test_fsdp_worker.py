"""The trainer's ranks on FSDP: what they save, they continue to the bit."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.distributed.tensor import DTensor  # noqa: E402

from tests.support.experiences import make_groups  # noqa: E402
from tests.support.tensors import assert_equal  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events.coordinator import staged_path  # noqa: E402
from trinity_schemas import SaveFinished, decode_envelope  # noqa: E402
from trinity_workers.algorithms.presets import preset_values  # noqa: E402
from trinity_workers.trainer.workers.fsdp import TrainWorker  # noqa: E402

STEPS = 4
PPO = {
    "algorithm": {
        **preset_values("ppo"),
        **{"epochs": 2, "mini_batches": 2},
        "critic": {"use": True, "learning_rate": 3e-3, "critic_warmup_steps": 1},
    },
    "trainer": {"warmup_steps": 2, "schedule": "cosine", "micro_batch_rows": 4},
    "sync": {"timeout": PATIENCE},
    "steps": STEPS,
}


def make_worker(rank, config):
    rank.objects.worker = TrainWorker(config, rank.number)
    return rank.objects.worker.address() if rank.number == 0 else None


def take_part(rank, host, port, seeds, *, loads=None, saves=None):
    """Train on these groups, after loading and before saving a checkpoint, if asked to."""
    worker = rank.objects.worker
    worker.setup(host, port)
    try:
        if loads is not None:
            worker.load_checkpoint(str(loads / "actor"))
        metrics = [worker.train_step(make_groups("r", seed)[rank.number :: 2]) for seed in seeds]
        if saves is not None:
            worker.save_checkpoint(str(saves / "actor"), len(seeds))
            worker.wait_on_save_thread()
        return metrics, tensors(worker)
    finally:
        worker.shutdown()


def tensors(worker):
    """Return weights and optimizer states of policy and critic in full."""
    values = {}
    for name in ("policy", "critic"):
        engine = getattr(worker._models, name)
        values |= {f"{name}.{key}": tensor for key, tensor in engine.module.state_dict().items()}
        for index, state in engine.optimizer.state_dict()["state"].items():
            values |= {f"{name}.{index}.{key}": tensor for key, tensor in state.items()}
    return {
        key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        for key, tensor in values.items()
    }


@pytest.fixture
def trained(rank_processes, make_config):
    rank_processes.leave()

    def run(world, seeds, **folders):
        settings = PPO | {"trainer": PPO["trainer"] | {"ranks": world}}
        config = make_config(**settings)
        rank_processes.start(world)
        place, *_ = rank_processes.call(range(world), make_worker, config)
        return rank_processes.call(range(world), _take_part, place, seeds, folders)

    return run


def _take_part(rank, place, seeds, folders):
    return take_part(rank, *place, seeds, **folders)


async def test_ppo_with_a_critic_resumes_to_the_bit_and_at_another_number_of_ranks(
    trained, make_config, log
):
    config = make_config()
    folder = staged_path(config.checkpoint_folder, config.epoch, 2)
    whole, expected = trained(2, (1, 2, 3, 4))[0]
    first, saved = trained(2, (1, 2), saves=folder)[0]
    assert first == whole[:2]
    assert "loss" not in whole[0], "the critic is trained alone first"
    assert whole[3]["critic/lr"] < whole[2]["critic/lr"], "the schedule falls"
    entries = await log.read(limit=1000)
    events = [decode_envelope(entry.payload).event for entry in entries]
    names = sorted(event.slot.name for event in events if isinstance(event, SaveFinished))
    assert names == sorted(
        2 * ["critic", "critic_training_state", "model_state_dict", "training_state"]
    )

    rest, resumed = trained(2, (3, 4), loads=folder)[0]
    assert rest == whole[2:]
    config = json.loads((folder / "critic" / "huggingface" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForTokenClassification"], "what veRL's merger makes"
    assert_equal(resumed, expected)
    _, alone = trained(1, (), loads=folder)[0]
    assert_equal(alone, saved)
