"""Rewards of an evaluation that count, where some failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trinity_events.errors import TrinityError

from ..rewards.settings import OnRewardError


class HeldOutRewardsFailed(TrinityError):
    """Rewards of answers to held-out questions failed.

    Attributes:
        reason: Sentence about the first error.
        failed: Answers whose reward failed.
        answers: Answers in all.
    """

    reason: str
    failed: int
    answers: int
    text = "the rewards of {failed} of {answers} answers failed, the first one: {reason}"


class Score(NamedTuple):
    """Reward of an answer, or the score in its place with the error of the reward."""

    reward: float
    error: str = ""


class CountedRewards(NamedTuple):
    """Rewards by question that the result of an evaluation counts."""

    rewards: list[list[float]]
    failed: int
    """Answers whose reward failed, of all questions."""


def select_rewards(scores: Sequence[Sequence[Score]], on_error: OnRewardError) -> CountedRewards:
    """Return the rewards that count.

    With ``score`` an answer counts with its score. With ``drop_group`` its question does not
    count. An evaluation without a result never ends a run, also with ``fail``.

    Raises:
        HeldOutRewardsFailed: Rewards failed, and none may fail or no question is left.
    """
    # The first one is shown, in the order of the questions.
    errors = [answer.error for question in scores for answer in question if answer.error]
    rewards = [
        [answer.reward for answer in question]
        for question in scores
        if on_error == "score" or not any(answer.error for answer in question)
    ]
    # Without a question left there is no mean, whatever the policy.
    if errors and (on_error == "fail" or not rewards):
        raise HeldOutRewardsFailed(errors[0], failed=len(errors), answers=sum(map(len, scores)))
    return CountedRewards(rewards, len(errors))
