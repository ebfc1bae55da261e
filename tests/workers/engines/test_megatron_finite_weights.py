"""Megatron neither saves nor loads weights that are not finite, and none is converted for it."""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from tests.support import megatron_ranks as at  # noqa: E402
from tests.support.poisoned_folders import POISONED, poisoned_copy  # noqa: E402
from tests.support.rank_processes import Rank  # noqa: E402
from trinity_workers.engines.megatron import ParallelLayout, checkpoint  # noqa: E402
from trinity_workers.learning.finite import NonFiniteWeights  # noqa: E402
from trinity_workers.runtime.collective_errors import PeerFailed  # noqa: E402

pytestmark = pytest.mark.megatron


def poison_megatron(rank: Rank) -> None:
    if rank.number == rank.world - 1:
        # Of what all ranks hold alike, such as norms, one rank's copy alone is saved.
        sharded = [
            parameter for parameter in rank.objects.engine._parameters() if parameter.ndim == 2
        ]
        with torch.no_grad():
            sharded[-1][-1, -1] = math.inf


def save_megatron(rank: Rank, folder: Path, *, unchecked: bool = False) -> None:
    if unchecked:
        with patch.object(checkpoint, "check_finite"):
            rank.objects.engine.save_checkpoint(str(folder))
    else:
        rank.objects.engine.save_checkpoint(str(folder))


def load_megatron(rank: Rank, folder: Path) -> None:
    rank.objects.engine.load_checkpoint(str(folder))


def test_megatron_neither_saves_nor_loads_a_checkpoint_that_is_not_finite_on_one_rank(
    converting, engine_ranks, tmp_path
):
    ranks = engine_ranks("qwen3", 2, ParallelLayout(tensor=2))
    ranks(poison_megatron)
    other, own = ranks.answers(save_megatron, tmp_path / "refused")
    assert isinstance(own, NonFiniteWeights)
    assert isinstance(other, PeerFailed)
    assert not (tmp_path / "refused" / "model").exists()
    ranks(save_megatron, tmp_path / "poisoned", unchecked=True)
    answers = ranks.answers(load_megatron, tmp_path / "poisoned")
    assert any(isinstance(error, NonFiniteWeights) for error in answers)
    assert all(isinstance(error, NonFiniteWeights | PeerFailed) for error in answers)
    with pytest.raises(NonFiniteWeights):
        converting(tmp_path / "poisoned", tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_megatron_does_not_load_a_folder_that_is_not_finite(rank_group, megatron_folder, tmp_path):
    poisoned = poisoned_copy(megatron_folder("qwen3"), tmp_path)
    for error in rank_group(2).answers(at.make_engine, poisoned, ParallelLayout(tensor=2)):
        assert isinstance(error, NonFiniteWeights)
        assert (error.tensor, error.count) == (POISONED, 1)


def test_a_folder_that_is_not_finite_is_not_converted(converting, megatron_folder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    poisoned_copy(megatron_folder("qwen3"), source)
    with pytest.raises(NonFiniteWeights) as caught:
        converting(source, tmp_path / "target")
    assert caught.value.tensor == POISONED
    assert not (tmp_path / "target").exists()
