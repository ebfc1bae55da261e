"""Claims about the groups that the trainer takes, asks for again or drops."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.support.experiences import group
from trinity_schemas import StepRef
from trinity_workers.algorithms.settings import FiltersConfig
from trinity_workers.trainer.trainer import judged

DYNAMIC = FiltersConfig(zero_variance="resample")


def sampled(rewards, step):
    tokens = [[7]] * len(rewards)
    logprobs = [[-1.0]] * len(rewards)
    return group([5], tokens, logprobs, rewards, version=StepRef(1, step))


@pytest.mark.parametrize(
    ("rewards", "step", "filters", "verdict"),
    [
        ([1.0, 0.0], 4, DYNAMIC, True),
        ([1.0, 1.0], 4, DYNAMIC, "filtered"),
        ([1.0, 1.0], 4, FiltersConfig(), True),
        ([1.0, 1.0], 4, FiltersConfig(zero_variance="mask"), True),
        ([1.0, 0.0], 3, DYNAMIC, "stale"),
        ([1.0, 1.0], 3, DYNAMIC, "stale"),
    ],
)
def test_a_group_is_taken_asked_for_again_or_dropped(rewards, step, filters, verdict):
    assert judged(sampled(rewards, step), 4, filters) == verdict
