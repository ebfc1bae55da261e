"""Batches of the experiences that explorers send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from trinity_events.errors import TrinityError
from trinity_events.rollouts.experience_checks import AnswerLimits, FaultKind, find_fault
from trinity_schemas import Experience

from .batch import NO_GROUP, Batch


class MalformedExperience(TrinityError, ValueError):
    """Raised for an experience that cannot be trained on.

    Attributes:
        ordinal: Ordinal of its prompt.
        sample: Index in its group.
        fault: Property that is at fault.
        detail: What is wrong with it.
    """

    ordinal: int
    sample: int
    fault: FaultKind
    detail: str
    text = (
        "sample {sample} of ordinal {ordinal} is malformed: {detail}; the dispatcher refuses such "
        "an answer, so that it came another way"
    )


class _Row(NamedTuple):
    prompt: list[int]
    response: list[int]
    mask: list[bool]
    logprobs: list[float]


def collate(
    groups: Sequence[Sequence[Experience]],
    pad_token_id: int,
    *,
    vocabulary_size: int | None = None,
) -> Batch:
    """Return all episodes as a batch on the CPU, in order; a row's group is its ordinal.

    Only the policy's tokens are trained on. Those of the environment are among the response.

    Args:
        groups: Samples of each prompt.
        pad_token_id: Token id of padding.
        vocabulary_size: Token ids of the model, if it is known.

    Raises:
        MalformedExperience: An experience cannot be trained on, such as one with a token id
            outside of the vocabulary, or with a reward that is not finite.
        ValueError: There are no experiences, or a group has those of two prompts.
    """
    limits = AnswerLimits(vocabulary_size=vocabulary_size)
    episodes = [
        (experience, _row(experience)) for group in groups for experience in _checked(group, limits)
    ]
    if not episodes:
        raise ValueError("no episodes to make a batch of")
    prompt_width = max(len(row.prompt) for _, row in episodes)
    response_width = max(len(row.response) for _, row in episodes)

    def laid_out(prompt: Sequence[int], response: Sequence[int], fill: int) -> list[int]:
        before = [fill] * (prompt_width - len(prompt))
        return [*before, *prompt, *response, *[fill] * (response_width - len(response))]

    def select_response(values: Sequence[float]) -> list[float]:
        return [*values, *[0] * (response_width - len(values))]

    attention = torch.tensor(
        [laid_out([1] * len(row.prompt), [1] * len(row.response), 0) for _, row in episodes]
    )
    return Batch(
        input_ids=torch.tensor(
            [laid_out(row.prompt, row.response, pad_token_id) for _, row in episodes]
        ),
        # From lengths: a policy may sample the padding token itself.
        attention_mask=attention,
        position_ids=(attention.cumsum(dim=-1) - 1).clamp_(min=0),
        response_mask=torch.tensor([select_response(row.mask) for _, row in episodes]).bool(),
        groups=torch.tensor([experience.ordinal for experience, _ in episodes]),
        rewards=torch.tensor(
            [experience.reward for experience, _ in episodes], dtype=torch.float32
        ),
        finished=torch.tensor([experience.finished for experience, _ in episodes]),
        behaviour_logprobs=torch.tensor(
            [select_response(row.logprobs) for _, row in episodes], dtype=torch.float32
        ),
    )


def padding_row(pad_token_id: int) -> Batch:
    """Return a batch of one padding row, for a rank that got no episodes."""
    return Batch(
        input_ids=torch.full((1, 2), pad_token_id),
        attention_mask=torch.tensor([[1, 0]]),
        position_ids=torch.zeros(1, 2, dtype=torch.int64),
        response_mask=torch.tensor([[False]]),
        groups=torch.tensor([NO_GROUP]),
        rewards=torch.zeros(1),
        finished=torch.tensor([True]),
        behaviour_logprobs=torch.zeros(1, 1),
    )


def _checked(group: Sequence[Experience], limits: AnswerLimits) -> Sequence[Experience]:
    ordinals = sorted({experience.ordinal for experience in group})
    if len(ordinals) > 1:
        raise ValueError(f"one group has episodes of the ordinals {ordinals}")
    for experience in group:
        fault = find_fault(experience, limits)
        if fault is not None:
            raise MalformedExperience(
                experience.ordinal, experience.sample, fault.kind, fault.detail
            )
    return group


def _row(episode: Experience) -> _Row:
    prompt, *turns = episode.turns
    row = _Row(list(prompt.tokens), [], [], [])
    for turn in turns:
        sampled = turn.role == "policy"
        row.response.extend(turn.tokens)
        row.mask.extend([sampled] * len(turn.tokens))
        row.logprobs.extend(turn.logprobs if sampled else [0.0] * len(turn.tokens))
    return row
