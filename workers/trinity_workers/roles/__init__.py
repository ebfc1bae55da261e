"""Roles of veRL's workers, each in a worker group of its own: actor, reference, critic, reward."""

from .actor import ActorRolloutRefWorker
from .base import RoleRefused, start_role
from .critic import CriticWorker
from .group import RoleGroup, create_experiences
from .reward import RewardModelWorker, RewardWorker

__all__ = [
    "ActorRolloutRefWorker",
    "CriticWorker",
    "RewardModelWorker",
    "RewardWorker",
    "RoleGroup",
    "RoleRefused",
    "create_experiences",
    "start_role",
]
