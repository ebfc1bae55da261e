"""Groups of experiences as rollouts make them."""

from __future__ import annotations

import random

from trinity_schemas import ExperienceGroup, StepRef

EPOCH = 2


def group(run_id: str, step: int, index: int = 0, *, epoch: int = EPOCH) -> ExperienceGroup:
    return ExperienceGroup(
        run_id=run_id,
        group_id=f"{epoch}-{step}-{index}",
        step=step,
        explorer=0,
        version=StepRef(epoch, 0),
        prompt_tokens=[1, 2],
        responses=[[3], [4, 5]],
        logprobs=[[-1.0], [-1.0, -2.0]],
        rewards=[0.0, 1.0],
        scores=[0.1, 1.0],
    )


def make_groups(run_id: str, seed: int, count: int = 5) -> list[ExperienceGroup]:
    """Groups whose lengths differ much, so that ranks get shares of very different size."""
    lot = random.Random(seed)
    groups = []
    for index in range(count):
        lengths = [lot.randint(1, 4) if index % 2 else lot.randint(6, 12) for _ in range(4)]
        rewards = [1.0, 0.0, *(float(lot.random() < 0.5) for _ in range(2))]
        groups.append(
            ExperienceGroup(
                run_id=run_id,
                group_id=f"1-{seed}-{index}",
                step=seed,
                explorer=0,
                version=StepRef(1, 0),
                prompt_tokens=[lot.randint(3, 90) for _ in range(lot.randint(2, 6))],
                responses=[[lot.randint(3, 90) for _ in range(length)] for length in lengths],
                logprobs=[[lot.uniform(-4.8, -4.3) for _ in range(length)] for length in lengths],
                rewards=rewards,
                scores=rewards,
            )
        )
    return groups
