"""Rewards as the run sees them, and the check of a function's value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from trinity_events.errors import TrinityError

from ..tasks import Answer, Question
from ..user_processes.frames import shown


class RewardFailed(TrinityError):
    """Raised if answers cannot be judged; the answers may be judged again."""


class Rewarded(Struct, frozen=True, kw_only=True):
    """Reward of one answer, and its named parts."""

    reward: float
    parts: dict[str, float] = {}
    """Other numbers that the function returned, such as `score`."""

    @property
    def score(self) -> float:
        """Return the part `score`, which is shown beside the reward; without one, the reward."""
        return self.parts.get("score", self.reward)


class Rewards(Protocol):
    """Judge of answers."""

    async def start(self) -> None:
        """Make ready, so that a judge that cannot work is told at once. Raises RewardFailed."""
        ...

    async def judge(self, question: Question, answers: Sequence[Answer]) -> list[Rewarded]:
        """Return the reward of each answer to a question. Raises RewardFailed."""
        ...

    async def aclose(self) -> None:
        """End what judges."""
        ...


def rewarded(value: object) -> Rewarded:
    """Return a reward function's value, checked. Raises ValueError if it is no reward."""
    if not isinstance(value, Mapping):
        return Rewarded(reward=_number("", value))
    if "reward" not in value:
        names = ", ".join(map(str, value)) or "nothing"
        raise ValueError(f"returned named numbers without 'reward': {names}")
    numbers = {str(name): _number(f"{name} = ", part) for name, part in value.items()}
    return Rewarded(reward=numbers.pop("reward"), parts=numbers)


def _number(name: str, value: object) -> float:
    try:
        # Python's numbers, and those of NumPy and torch; text is none, though float() reads it.
        if not hasattr(type(value), "__float__"):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except Exception:
        raise ValueError(
            f"returned {name}{shown(value)}, and a reward is a number or a mapping with 'reward'"
        ) from None
    if not math.isfinite(number):
        raise ValueError(f"returned {name}{number}, and a reward is finite")
    return number
