"""Metrics of a step's samples: spread of rewards and lengths, and the parts of the reward."""

import pytest
from msgspec.structs import replace

from trinity_schemas import Experience, PayloadAddress, StepRef, Turn, refer
from trinity_workers.trainer.sample_metrics import count_fates, summarize_samples


def sample(reward, length, *, tokens=None, finished=True, **parts):
    """Return a sample whose policy wrote some tokens."""
    turns = [
        Turn(role="prompt", tokens=[1, 2]),
        Turn(
            role="policy",
            tokens=tokens or [3] * length,
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
        finished=finished,
    )


def test_each_part_is_the_mean_over_the_rewards_that_have_it():
    samples = [sample(0.0, 3, style=0.5, score=1.0), sample(1.0, 7, style=1.5, format=1.0)]
    assert summarize_samples(samples) == pytest.approx(
        {
            "reward_std": 0.5,
            "response_length_min": 3.0,
            "response_length_max": 7.0,
            "rollout/truncated_answers": 0.0,
            "rollout/empty_answers": 0.0,
            "rollout/repeated_answers": 0.0,
            "reward_parts/format": 1.0,
            "reward_parts/style": 1.0,
        }
    )


def test_the_number_of_parts_is_bounded():
    metrics = summarize_samples([sample(0.0, 1, **{f"p{at:03}": 1.0 for at in range(99)})])
    assert len([name for name in metrics if name.startswith("reward_parts/")]) == 32


def test_answers_that_are_cut_off_empty_or_end_in_a_loop_are_counted():
    metrics = summarize_samples(
        [
            sample(0.0, 100),
            sample(0.0, 100, tokens=[*range(40), *[7, 8, 9] * 20]),  # its end alone
            sample(0.0, 100, tokens=list(range(100))),
            sample(0.0, 63),  # too short for a loop
            sample(0.0, 1),
            sample(0.0, 1, finished=False),  # of a limit of one token
            sample(0.0, 9, finished=False),
            sample(0.0, 9),
        ]
    )
    shares = {name: metrics[f"rollout/{name}_answers"] for name in ("truncated", "empty")}
    assert shares == {"truncated": 2 / 8, "empty": 1 / 8}
    # The second loop has a tail of 60 tokens of 64: few runs of four tokens all the same.
    assert metrics["rollout/repeated_answers"] == 2 / 8


def test_loops_are_counted_where_the_tokens_lie_elsewhere():
    address = PayloadAddress(transport="redis", name="0" * 32, size=1, digest="xxh3:" + "0" * 32)
    loop, other = sample(0.0, 100), sample(0.0, 100, tokens=list(range(100)))
    references = refer([loop, other], address)
    assert summarize_samples(references)["rollout/repeated_answers"] == 1 / 2
    # Of an earlier version of an explorer.
    silent = [replace(reference, ends_in_loop=None) for reference in references]
    assert "rollout/repeated_answers" not in summarize_samples(silent)


def test_equal_groups_count_those_that_were_filtered_and_failures_no_choices():
    groups = [[sample(1.0, 2), sample(1.0, 3)], [sample(0.0, 2), sample(1.0, 3)]]
    dropped = {"filtered": 2, "reward-failed": 3, "attempts": 1, "overlong": 9, "task-set": 9}
    assert count_fates(groups, dropped) == {
        "rollout/equal_rewards": 3 / 4,
        "rollout/infra_failed_rate": 4 / 8,
    }
    assert count_fates([[sample(1.0, 2)]], {}) == {"rollout/infra_failed_rate": 0.0}
