"""The warm-up of the built-in policy."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from tests.support.tensors import identical
from trinity_workers.launch.warm_up import warm_up
from trinity_workers.learning import policy
from trinity_workers.tasks import SpellBackward


def test_the_warm_up_lowers_the_loss_and_gives_the_same_weights_for_the_same_seed(
    tmp_path: Path,
) -> None:
    losses: list[float] = []
    weights = []
    for name in ("one", "two"):
        policy.create_policy(tmp_path / name, seed=2)
        steps, accuracy = warm_up(
            tmp_path / name,
            SpellBackward(),
            seed=2,
            max_steps=10,
            report=lambda _step, loss, _accuracy: losses.append(loss),
        )
        assert steps == 10
        assert 0.0 <= accuracy <= 1.0
        weights.append(policy.load_policy(tmp_path / name)[0].state_dict())
    assert losses[1] < losses[0]
    assert losses[:2] == losses[2:]
    assert all(identical(weights[0][key], weights[1][key]) for key in weights[0])
