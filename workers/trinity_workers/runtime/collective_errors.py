"""Errors of collectives, in a module without torch: the caller of the ranks handles them too."""

from __future__ import annotations

from typing import ClassVar, Literal

from trinity_events.errors import TrinityError


class PeerFailed(TrinityError):
    """Another rank failed in a collective operation.

    Attributes:
        rank: Lowest rank that failed.
        reason: Class and text of its error.
    """

    rank: int
    reason: str
    text = "rank {rank} failed: {reason}"


class CollectiveBroken(TrinityError):
    """A collective failed because a rank died or was too slow.

    Attributes:
        fault: Work of the ranks that failed.
        reason: Error of the process group.
        step: Step of the weights or of the save, if it is one of a step.
        culprit: Rank that died or was too slow, if known.
    """

    fault: Literal["agree", "gather", "broadcast", "save", "reshard"]
    reason: str
    step: int | None = None
    culprit: int | None = None
    texts: ClassVar = {
        "agree": "the ranks could not agree, because {_culprit} died or was too slow: {reason}",
        "gather": "the weights{_step} could not be gathered, because {_culprit} died or was too "
        "slow: {reason}",
        "broadcast": "the weights{_step} could not be broadcast, because a rank that receives them "
        "died or was too slow: {reason}",
        "save": "step {step} could not be saved, because {_culprit} died or was too slow: {reason}",
        "reshard": "the weights{_step} could not be resharded, because {_culprit} died or was too "
        "slow: {reason}",
    }

    @property
    def _step(self) -> str:
        return "" if self.step is None else f" of step {self.step}"

    @property
    def _culprit(self) -> str:
        return "a rank" if self.culprit is None else f"rank {self.culprit}"
