"""Metrics of a step's samples: spread of rewards and lengths, and the parts of the reward."""

import pytest

from trinity_schemas import Experience, StepRef, Turn
from trinity_workers.trainer.sample_metrics import summarize_samples


def sample(reward, length, **parts):
    """Return a sample whose policy wrote some tokens."""
    turns = [
        Turn(role="prompt", tokens=[1, 2]),
        Turn(
            role="policy",
            tokens=[3] * length,
            logprobs=[-1.0] * length,
            versions=[(StepRef(1, 0), length)],
        ),
    ]
    return Experience(
        run_id="run",
        epoch=1,
        ordinal=0,
        attempt=1,
        sample=0,
        samples=1,
        explorer="explorer-0",
        turns=turns,
        reward=reward,
        reward_parts=parts,
    )


def test_each_part_is_the_mean_over_the_rewards_that_have_it():
    samples = [sample(0.0, 3, style=0.5, score=1.0), sample(1.0, 7, style=1.5, format=1.0)]
    assert summarize_samples(samples) == pytest.approx(
        {
            "reward_std": 0.5,
            "response_length_min": 3.0,
            "response_length_max": 7.0,
            "reward_parts/format": 1.0,
            "reward_parts/style": 1.0,
        }
    )


def test_the_number_of_parts_is_bounded():
    metrics = summarize_samples([sample(0.0, 1, **{f"p{at:03}": 1.0 for at in range(99)})])
    assert len([name for name in metrics if name.startswith("reward_parts/")]) == 32
