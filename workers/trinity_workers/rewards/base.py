"""Rewards as the run sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..tasks import Answer, Question
from .errors import AnswersFailed
from .values import Rewarded, RewardFault


class Rewards(Protocol):
    """Judge of answers."""

    async def start(self) -> None:
        """Make ready, so that a judge that cannot work is told at once. Raises RewardFailed."""
        ...

    async def judge(self, question: Question, answers: Sequence[Answer]) -> list[Rewarded]:
        """Return the reward of each answer to a question.

        Raises:
            RewardFailed: One answer could not be judged, or more. What may pass, such as an
                overloaded service, was tried again before.
        """
        ...

    async def aclose(self) -> None:
        """End what judges."""
        ...


def collect_rewards(
    rewarded: Mapping[int, Rewarded], faults: Mapping[int, RewardFault]
) -> list[Rewarded]:
    """Return the rewards of answers in order. Raises AnswersFailed if one of them has an error."""
    if faults:
        raise AnswersFailed(faults=faults, rewarded=rewarded)
    return [rewarded[index] for index in range(len(rewarded))]
