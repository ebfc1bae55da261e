"""What the leading reducer is to insist on as time passes."""

from __future__ import annotations

import math

from msgspec import Struct

from ..core.limits import KEPT_COMPLETE_CHECKPOINTS
from ..errors import TrinityError

STEP_DEADLINE = 600.0
GROUP_IDLE = 86_400.0
KEEP_CHECKPOINTS = 2


class InvalidPolicy(TrinityError):
    """A policy that cannot be followed."""


class Policy(Struct, frozen=True, kw_only=True):
    """How long the reducer waits, and what it keeps.

    Attributes:
        step_deadline: Seconds from a step's commit until it fails with what it lacks.
        group_idle: Seconds of silence after which a consumer group holds up the log no more.
        keep_checkpoints: How many of the newest ready checkpoints stay; 0 keeps all.
        adopt_folders: Runs whose folder is taken over where it belongs to another log.
    """

    step_deadline: float = STEP_DEADLINE
    group_idle: float = GROUP_IDLE
    keep_checkpoints: int = KEEP_CHECKPOINTS
    adopt_folders: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, seconds in (
            ("step-deadline", self.step_deadline),
            ("group-idle", self.group_idle),
        ):
            if not (math.isfinite(seconds) and seconds > 0):
                raise InvalidPolicy(
                    f"--{name} is {seconds:g}, but takes a number of seconds above 0: "
                    "name a large one to wait for very long"
                )
        if self.keep_checkpoints < 0:
            raise InvalidPolicy(
                f"--keep-checkpoints is {self.keep_checkpoints}, but takes how many of the newest "
                "checkpoints to keep: 2 or more keep that many, 0 keeps all"
            )
        if self.keep_checkpoints > KEPT_COMPLETE_CHECKPOINTS:
            raise InvalidPolicy(
                f"--keep-checkpoints is {self.keep_checkpoints}, but the state knows of the newest "
                f"{KEPT_COMPLETE_CHECKPOINTS} alone: take as many or fewer, or 0 to keep all"
            )
