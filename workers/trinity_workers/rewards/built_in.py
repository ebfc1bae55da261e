"""Rewards of a built-in task, which need no process of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..tasks import Answer, Question
from .values import Rewarded, rewarded


class TaskRewards:
    """Judge by a function that is known to return, in this process.

    Args:
        reward: Reward function of a built-in task.
    """

    def __init__(self, reward: Callable[[Question, Answer], float | Mapping[str, float]]) -> None:
        self._reward = reward

    async def start(self) -> None:
        """Do nothing: the function is known."""

    async def judge(self, question: Question, answers: Sequence[Answer]) -> list[Rewarded]:
        """Return the reward of each answer."""
        return [rewarded(self._reward(question, answer)) for answer in answers]

    async def aclose(self) -> None:
        """Do nothing: no process was started."""
