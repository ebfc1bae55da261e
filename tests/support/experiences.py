"""Groups of experiences, as rollouts make them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from trinity_schemas import Experience, StepRef, Turn

FIRST = StepRef(1, 0)
"""Version that sampled them, unless a test says otherwise."""


def group(
    prompt: Sequence[int],
    responses: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    rewards: Sequence[float],
    *,
    run_id: str = "r",
    ordinal: int = 0,
    version: StepRef = FIRST,
) -> list[Experience]:
    """All samples of one prompt, each with one turn of the policy."""
    return [
        Experience(
            run_id=run_id,
            epoch=version.epoch,
            ordinal=ordinal,
            attempt=1,
            sample=index,
            samples=len(responses),
            explorer="explorer-0",
            turns=[
                Turn(role="prompt", tokens=list(prompt)),
                Turn(
                    role="policy",
                    tokens=list(tokens),
                    logprobs=list(of_tokens),
                    versions=[(version, len(tokens))],
                ),
            ],
            reward=reward,
        )
        for index, (tokens, of_tokens, reward) in enumerate(
            zip(responses, logprobs, rewards, strict=True)
        )
    ]


def make_groups(run_id: str, seed: int, count: int = 5) -> list[list[Experience]]:
    """Groups whose lengths differ much, so that ranks get shares of very different size."""
    lot = random.Random(seed)
    groups = []
    for index in range(count):
        lengths = [lot.randint(1, 4) if index % 2 else lot.randint(6, 12) for _ in range(4)]
        rewards = [1.0, 0.0, *(float(lot.random() < 0.5) for _ in range(2))]
        groups.append(
            group(
                [lot.randint(3, 90) for _ in range(lot.randint(2, 6))],
                [[lot.randint(3, 90) for _ in range(length)] for length in lengths],
                [[lot.uniform(-4.8, -4.3) for _ in range(length)] for length in lengths],
                rewards,
                run_id=run_id,
                ordinal=index,
            )
        )
    return groups
