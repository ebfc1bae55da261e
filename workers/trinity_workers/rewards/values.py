"""Rewards and errors of single answers, and the check of a function's value."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from trinity_schemas import FailedDependency
from trinity_schemas.identity import LONGEST_NAME
from trinity_schemas.rollouts import MAX_FLOAT32, MAX_REWARD, MAX_REWARD_PARTS, REWARD_RANGE

from ..sandbox.processes.frames import format_value

NO_REWARD = "NoReward"
"""Type of the error of a function that returned what is no finite number."""


class RewardFault(Struct, frozen=True, kw_only=True):
    """Error of a reward for one answer. Type and place are its cause."""

    sentence: str
    """End of a sentence about the reward, such as ``raised KeyError: 'a'``."""
    error_type: str
    """Type of the error; that of a value that is no reward is :data:`NO_REWARD`."""
    place: str = ""
    """File and line of the user's code that raised it."""
    traceback: str = ""
    dependency: FailedDependency | None = None
    """Something else that failed in place of the reward, such as a service that is away."""


class Rewarded(Struct, frozen=True, kw_only=True):
    """Reward of one answer, and its named parts."""

    reward: float
    parts: dict[str, float] = {}
    """Other numbers that the function returned, such as `score`."""
    judge_reply: str = ""
    """Reply of the model that judged the answer, without the middle of a long one."""

    @property
    def score(self) -> float:
        """Return the part `score`, which is shown beside the reward; without one, the reward."""
        return self.parts.get("score", self.reward)


def rewarded(value: object) -> Rewarded:
    """Return a reward function's value, checked. Raises ValueError if it is no reward.

    Its limits are those of an experience: the trainer refuses one that exceeds them.
    """
    if not isinstance(value, Mapping):
        return Rewarded(reward=_reward("", value))
    if "reward" not in value:
        names = ", ".join(map(str, value)) or "nothing"
        raise ValueError(f"returned named numbers without 'reward': {names}")
    # Here already: later the trainer would refuse the whole answer.
    if len(value) - 1 > MAX_REWARD_PARTS:
        raise ValueError(
            f"returned {len(value) - 1} numbers beside 'reward', and a reward has at most "
            f"{MAX_REWARD_PARTS} parts"
        )
    parts = {str(name): _part(str(name), part) for name, part in value.items() if name != "reward"}
    return Rewarded(reward=_reward("reward = ", value["reward"]), parts=parts)


def _reward(name: str, value: object) -> float:
    number = _number(name, value)
    # A comparison with NaN is false, so that it fails here too.
    if not -MAX_REWARD <= number <= MAX_REWARD:
        raise ValueError(f"returned {name}{number:g}, and a reward is {REWARD_RANGE}")
    return number


def _part(name: str, value: object) -> float:
    if len(name) > LONGEST_NAME:
        raise ValueError(
            f"returned a part with a name of {len(name)} letters, and {LONGEST_NAME} are the most"
        )
    number = _number(f"{name} = ", value)
    if not -MAX_FLOAT32 <= number <= MAX_FLOAT32:
        raise ValueError(
            f"returned {name} = {number:g}, and a part of a reward is finite in float32"
        )
    return number


def _number(name: str, value: object) -> float:
    try:
        # Python's numbers, and those of NumPy and torch; text is none, though float() reads it.
        if not hasattr(type(value), "__float__"):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except Exception:
        raise ValueError(
            f"returned {name}{format_value(value)}, and a reward is a number or a mapping with "
            "'reward'"
        ) from None
    return number
