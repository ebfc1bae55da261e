"""Batches of the experiences that explorers send."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trinity_events.errors import TrinityError
from trinity_events.rollouts.experience_checks import AnswerLimits, FaultKind, find_group_fault
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


def collate(
    groups: Sequence[Sequence[Experience]],
    pad_token_id: int,
    *,
    vocabulary_size: int | None = None,
) -> Batch:
    """Return all episodes as a batch on the CPU, in order; a row's group is its ordinal.

    Only the policy's tokens are trained on. Those of the environment are among the response. Each
    turn is copied once, from the bytes that it came in to its row.

    Args:
        groups: Samples of each prompt.
        pad_token_id: Token id of padding.
        vocabulary_size: Token ids of the model, if it is known.

    Raises:
        MalformedExperience: An experience cannot be trained on, such as one with a token id
            outside of the vocabulary, or with a reward that is not finite.
        ValueError: There are no experiences, or a group has those of two prompts.
    """
    # Checked again after the dispatcher: an own loop may bring samples that never passed it.
    limits = AnswerLimits(vocabulary_size=vocabulary_size)
    episodes = [experience for group in groups for experience in _checked(group, limits)]
    if not episodes:
        raise ValueError("no episodes to make a batch of")
    lengths = [[len(turn.tokens) for turn in episode.turns] for episode in episodes]
    prompt_width = max(prompt for prompt, *_ in lengths)
    response_width = max(sum(turns) for _, *turns in lengths)
    shape = len(episodes), prompt_width + response_width
    input_ids = np.full(shape, pad_token_id, np.int64)  # (rows, prompt + response)
    attention_mask = np.zeros(shape, np.int64)  # (rows, prompt + response)
    # Written once, as the rest: a cumulative sum would fill three arrays of this size.
    position_ids = np.zeros(shape, np.int64)  # (rows, prompt + response)
    positions = np.arange(shape[1])
    response_mask = np.zeros((len(episodes), response_width), np.bool_)  # (rows, response)
    logprobs = np.zeros((len(episodes), response_width), np.float32)
    for row, episode in enumerate(episodes):
        # Prompts are padded on the left, so that all responses begin in one column.
        start = prompt_width - lengths[row][0]
        # From lengths: a policy may sample the padding token itself.
        end = start + sum(lengths[row])
        attention_mask[row, start:end] = 1
        # Padding has a position that every embedding has: 0 before the tokens, their last after.
        position_ids[row, start:end] = positions[: end - start]
        position_ids[row, end:] = end - start - 1
        for turn, length in zip(episode.turns, lengths[row], strict=True):
            input_ids[row, start : start + length] = turn.token_view
            if turn.role == "policy":
                columns = slice(start - prompt_width, start - prompt_width + length)
                response_mask[row, columns] = True
                logprobs[row, columns] = turn.logprob_view
            start += length
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        attention_mask=torch.from_numpy(attention_mask),
        position_ids=torch.from_numpy(position_ids),
        response_mask=torch.from_numpy(response_mask),
        groups=torch.tensor([episode.ordinal for episode in episodes]),
        rewards=torch.tensor([episode.reward for episode in episodes], dtype=torch.float32),
        finished=torch.tensor([episode.finished for episode in episodes]),
        behaviour_logprobs=torch.from_numpy(logprobs),
    )


def padding_row(pad_token_id: int) -> Batch:
    """Return a batch of one padding row, for a rank that got no episodes."""
    return Batch(
        # Two columns: a response token needs one before it, whose output predicts it. The first is
        # attended to for the reason that Batch.padding_rows() gives.
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
    if (malformed := find_group_fault(group, limits)) is not None:
        experience, fault = malformed
        raise MalformedExperience(experience.ordinal, experience.sample, fault.kind, fault.detail)
    return group
