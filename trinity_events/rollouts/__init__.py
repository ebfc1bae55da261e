"""Rollouts: requests of the trainer, claims and answers of explorers, and the fate of each."""

from .breaker import CircuitBreaker, DependencyAway
from .client import Claim, RolloutClient
from .dispatch_state import AnswerGroup, HeldRequest
from .dispatcher import RewardsFailed, RolloutDispatcher, RolloutsFailed
from .exclusions import Exclusions, ExplorersExcluded
from .experience_checks import AnswerLimits
from .settings import DispatchSettings, find_answer_bytes
from .streams import ABORTED, AnswersServerFull, evaluation_keys

__all__ = [
    "ABORTED",
    "AnswerGroup",
    "AnswerLimits",
    "AnswersServerFull",
    "CircuitBreaker",
    "Claim",
    "DependencyAway",
    "DispatchSettings",
    "Exclusions",
    "ExplorersExcluded",
    "HeldRequest",
    "RewardsFailed",
    "RolloutClient",
    "RolloutDispatcher",
    "RolloutsFailed",
    "evaluation_keys",
    "find_answer_bytes",
]
