"""Rewards of answers: a user's function in a process of its own, with a deadline."""

from .base import Rewarded, RewardFailed, RewardFault, Rewards
from .built_in import TaskRewards
from .child import RewardSource
from .pool import RewardPool

__all__ = [
    "RewardFailed",
    "RewardFault",
    "RewardPool",
    "RewardSource",
    "Rewarded",
    "Rewards",
    "TaskRewards",
]
