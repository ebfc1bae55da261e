"""Rewards of answers: a user's function in a process of its own, with a deadline."""

from .base import Rewards
from .built_in import TaskRewards
from .child import RewardSource
from .errors import RewardFailed
from .pool import RewardPool
from .values import Rewarded, RewardFault

__all__ = [
    "RewardFailed",
    "RewardFault",
    "RewardPool",
    "RewardSource",
    "Rewarded",
    "Rewards",
    "TaskRewards",
]
