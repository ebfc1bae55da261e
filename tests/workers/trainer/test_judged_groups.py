"""Claims about the groups that the trainer takes or drops."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.support.experiences import group
from trinity_events.rollouts import Group
from trinity_workers.algorithms.settings import FiltersConfig
from trinity_workers.trainer.supply import judged

DYNAMIC = FiltersConfig(zero_variance="resample")


def sampled(rewards):
    tokens = [[7]] * len(rewards)
    samples = group([5], tokens, [[-1.0]] * len(rewards), rewards)
    return Group(ordinal=0, attempt=1, experiences=samples, entry_ids=["1-0"])


@pytest.mark.parametrize(
    ("rewards", "filters", "verdict"),
    [
        ([1.0, 0.0], DYNAMIC, True),
        ([1.0, 1.0], DYNAMIC, "filtered"),
        ([1.0, 1.0], FiltersConfig(), True),
        ([1.0, 1.0], FiltersConfig(zero_variance="mask"), True),
    ],
)
def test_a_group_is_taken_or_dropped(rewards, filters, verdict):
    assert judged(sampled(rewards), filters) == verdict
