"""Experience groups, which explorers send to the trainer on a stream of its own."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .identity import Rank, RunId, Slug, Step, StepRef

TokenId = Annotated[int, Meta(ge=0, le=2**31)]


class ExperienceGroup(Struct, frozen=True, kw_only=True):
    """All sampled answers to one prompt, from one policy version.

    ``responses`` are token ids without padding. ``logprobs`` has their shape and holds natural
    log-probabilities under the policy that sampled them. The trainer learns from ``rewards`` (1.0
    if the verifier accepts the answer); ``scores`` are the verifier's own partial scores.
    """

    run_id: RunId
    group_id: Annotated[
        Slug, Meta(description="Name of the group; a second group of that name is dropped.")
    ]
    step: Annotated[Step, Meta(description="Training step that uses the group.")]
    explorer: Annotated[Rank, Meta(description="Rank of the explorer that made the group.")]
    version: Annotated[StepRef, Meta(description="Weight version that sampled the answers.")]
    prompt_tokens: Annotated[list[TokenId], Meta(description="Token ids of the prompt.")]
    responses: Annotated[list[list[TokenId]], Meta(description="Token ids of each answer.")]
    logprobs: Annotated[
        list[list[float]], Meta(description="One log-probability for each token of each answer.")
    ]
    rewards: Annotated[list[float], Meta(description="One reward for each answer.")]
    scores: Annotated[list[float], Meta(description="One score for each answer.")]

    def __post_init__(self) -> None:
        sizes = {len(self.responses), len(self.logprobs), len(self.rewards), len(self.scores)}
        if len(sizes) != 1:
            raise ValueError("responses, logprobs, rewards and scores must have one length")
        if not (self.prompt_tokens and self.responses and all(self.responses)):
            raise ValueError("the prompt and every response must have at least one token")
        for response, logprobs in zip(self.responses, self.logprobs, strict=True):
            if len(response) != len(logprobs):
                raise ValueError("every response needs one log-probability a token")
