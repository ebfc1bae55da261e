"""A rollout request, and experiences, as the contract has them."""

from __future__ import annotations

from typing import Any

import msgspec

from trinity_schemas import Experience, RolloutRequest, Sampling, StepRef, Turn

REQUEST = RolloutRequest(
    run_id="r",
    epoch=2,
    ordinal=3,
    attempt=1,
    samples=2,
    sampling=Sampling(max_new_tokens=8),
    oldest=StepRef(1, 4),
    fingerprint="sha256:" + "0" * 64,
    deadline=60.0,
)
PROMPT = Turn(role="prompt", tokens=[1])


def policy(tokens=(2, 3), *, counted=None, **more):
    counted = len(tokens) if counted is None else counted
    logprobs = more.get("logprobs", [-0.5] * len(tokens))
    versions = [(StepRef(1, 4), counted)] if counted else []
    return Turn(role="policy", tokens=list(tokens), logprobs=logprobs, versions=versions)


def experience(*turns, sample=1):
    return Experience(
        run_id="r",
        epoch=2,
        ordinal=3,
        attempt=1,
        sample=sample,
        samples=2,
        explorer="explorer-0",
        turns=list(turns) or [PROMPT, policy()],
        reward=1.0,
    )


def as_lists(message: Experience | Turn) -> dict[str, Any]:
    """Return a message as plain data with lists in the place of arrays, as older explorers do."""
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    turns = (
        zip(plain["turns"], message.turns, strict=True) if "turns" in plain else [(plain, message)]
    )
    for fields, turn in turns:
        fields |= {"tokens": [*turn.tokens], "logprobs": [*turn.logprobs]}
    return plain
