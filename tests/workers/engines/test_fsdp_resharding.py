"""FSDP checkpoints loaded in another layout, or number of ranks, than they were saved with."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.errors import assert_attributes

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from tests.support.rank_processes import Rank  # noqa: E402
from tests.support.tensors import assert_equal, identical  # noqa: E402
from trinity_events.checkpoints.layout import MANIFEST  # noqa: E402
from trinity_events.checkpoints.verification import CheckpointDamaged  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine  # noqa: E402
from trinity_workers.engines.fsdp_options import FSDPOptions  # noqa: E402
from trinity_workers.engines.fsdp_tensor import TensorRanks  # noqa: E402
from trinity_workers.engines.learning_rate import LearningRate  # noqa: E402
from trinity_workers.engines.reshard import ReshardRefused, tensors_of_shards  # noqa: E402
from trinity_workers.learning.values import load_critic  # noqa: E402
from trinity_workers.runtime.collective_errors import PeerFailed  # noqa: E402

pytestmark = pytest.mark.timeout(300)
CPU = torch.device("cpu")


def begin(
    rank: Rank, policy: Path, load: Callable[..., Any] | None = None, tensor: int = 1
) -> None:
    rate = LearningRate(highest=1e-3, warmup_steps=2, schedule="cosine", steps=5)
    options = FSDPOptions(tensor=TensorRanks.of(tensor, CPU))
    rank.objects.engine = FSDPEngine(
        policy, device=CPU, learning_rate=rate, load=load, options=options
    )
    rank.objects.engine.module.train()


def take_step(rank: Rank, seed: int) -> float:
    """Take a step on the same tokens on all ranks, so that their number does not matter."""
    tokens = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(seed))
    loss = rank.objects.engine.module(input_ids=tokens, labels=tokens, use_cache=False).loss
    return rank.objects.engine.optimizer_step(loss)


def take_critics_step(rank: Rank, seed: int) -> float:
    """Take such a step of a critic."""
    tokens = torch.randint(3, 90, (4, 16), generator=torch.Generator().manual_seed(seed))
    values = rank.objects.engine.module(input_ids=tokens, use_cache=False)
    return rank.objects.engine.optimizer_step((values - 1.0).square().mean())


def save(rank: Rank, folder: Path) -> None:
    rank.objects.engine.save_checkpoint(str(folder))


def load_checkpoint(rank: Rank, folder: Path) -> None:
    rank.objects.engine.load_checkpoint(str(folder))


def full(rank: Rank) -> dict[str, torch.Tensor]:
    """Return all tensors of model and optimizer in full, by name."""
    engine = rank.objects.engine
    optimizer = engine.optimizer.state_dict()
    tensors: dict[str, Any] = dict(engine.module.state_dict())
    for index, state in optimizer["state"].items():
        tensors |= {f"{index}.{name}": value for name, value in state.items()}
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in tensors.items()
    }


def schedule(rank: Rank) -> tuple[Any, Any]:
    engine = rank.objects.engine
    return engine.scheduler.state_dict(), engine.optimizer.state_dict()["param_groups"]


def draw(rank: Rank) -> tuple[float, float, float]:
    """Return a number of each generator of the process."""
    return random.random(), float(np.random.random()), float(torch.rand(()))


@pytest.mark.parametrize(
    ("saved_with", "loaded_with", "load", "step"),
    [
        ((2, 1), (3, 1), None, take_step),
        ((3, 1), (1, 1), None, take_step),
        ((2, 1), (3, 1), load_critic, take_critics_step),
        ((2, 2), (2, 1), None, take_step),
        ((3, 1), (4, 2), load_critic, take_critics_step),
        ((4, 2), (1, 1), None, take_step),
    ],
    ids=["more ranks", "fewer ranks", "critic", "whole layers", "shared layers", "one rank"],
)
def test_a_checkpoint_loads_bit_for_bit_in_another_layout(
    rank_group, policy_folder, tmp_path, saved_with, loaded_with, load, step
):
    ranks, tensor = saved_with
    group = rank_group(ranks)
    group(begin, policy_folder, load, tensor)
    for seed in (1, 2):
        group(step, seed)
    group(save, tmp_path)
    tensors, plan = group(full)[0], group(schedule)[0]
    for name, value in tensors_of_shards(tmp_path):  # as a conversion reads them
        assert identical(value, tensors[name]), name

    loaded_with, tensor = loaded_with
    group = rank_group(loaded_with)
    group(begin, policy_folder, load, tensor)
    group(load_checkpoint, tmp_path)
    for weights in group(full):
        assert_equal(weights, tensors)
    assert group(schedule) == [plan] * loaded_with
    group(step, 3)  # the loaded optimizer goes on


def test_all_generators_go_on_where_they_were(rank_group, policy_folder, tmp_path):
    group = rank_group(2)
    group(begin, policy_folder)
    group(save, tmp_path / "two")
    drawn = group(draw)
    assert group(draw) != drawn
    group(load_checkpoint, tmp_path / "two")
    assert group(draw) == drawn
    group = rank_group(1)
    group(begin, policy_folder)
    group(load_checkpoint, tmp_path / "two")
    assert group(draw) == drawn[:1]


def test_a_shard_that_is_missing_is_named_and_loads_nothing(rank_group, policy_folder, tmp_path):
    group = rank_group(2)
    group(begin, policy_folder)
    group(take_step, 1)
    group(save, tmp_path)
    (tmp_path / "optim_world_size_2_rank_1.pt").unlink()
    group = rank_group(3)
    group(begin, policy_folder)
    before = group(full)[0]
    answers = group.answers(load_checkpoint, tmp_path)
    assert [type(error) for error in answers] == [CheckpointDamaged] * 3
    assert {error.path for error in answers} == {tmp_path / "optim_world_size_2_rank_1.pt"}
    (tmp_path / MANIFEST).unlink()  # as of a checkpoint of an earlier version
    answers = group.answers(load_checkpoint, tmp_path)
    assert all(isinstance(error, FileNotFoundError | PeerFailed) for error in answers)
    assert "optim_world_size_2_rank_1.pt" in str(answers[0])
    assert_equal(group(full)[0], before)


def test_shards_of_two_numbers_of_ranks_are_refused_by_a_third(rank_group, policy_folder, tmp_path):
    for world in (1, 2):
        group = rank_group(world)
        group(begin, policy_folder)
        group(save, tmp_path)
    group = rank_group(3)
    group(begin, policy_folder)
    refused = group.answers(load_checkpoint, tmp_path)
    assert {type(error) for error in refused} == {ReshardRefused}
    assert_attributes(refused[0], fault="ranks", folder=tmp_path, ranks=(1, 2))
