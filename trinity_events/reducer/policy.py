"""Policy of the leading reducer: deadlines, and what it keeps."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from msgspec import Struct

from ..core.limits import KEPT_COMPLETE_CHECKPOINTS
from ..errors import TrinityError

STEP_DEADLINE = 600.0
"""Seconds after its commit at which an incomplete step fails, by default."""
GROUP_IDLE = 86_400.0
"""Seconds without a read after which an idle group is detached, by default."""
KEEP_CHECKPOINTS = 2
"""Number of ready checkpoints to keep, by default."""


class InvalidPolicy(TrinityError):
    """A policy value is out of range.

    Attributes:
        option: Option that sets it.
        value: The value.
        fault: ``seconds`` if it is no deadline, ``negative`` or ``unknown`` for a number of
            checkpoints.
        limit: Number of the newest checkpoints that the state has.
    """

    option: str
    value: float
    fault: Literal["seconds", "negative", "unknown"]
    limit: int = 0
    texts: ClassVar = {
        "seconds": "{option} is {value:g}, but takes a number of seconds above 0: name a large one "
        "to wait for very long",
        "negative": "{option} is {value}, but takes how many of the newest checkpoints to keep: 2 "
        "or more keep that many, 0 keeps all",
        "unknown": "{option} is {value}, but the state knows of the newest {limit} alone: take as "
        "many or fewer, or 0 to keep all",
    }


class Policy(Struct, frozen=True, kw_only=True):
    """Deadlines of the reducer, and what it keeps.

    Attributes:
        step_deadline: Seconds after its commit at which an incomplete step fails.
        group_idle: Seconds without a read after which an idle consumer group is detached.
        keep_checkpoints: Number of the newest ready checkpoints to keep; 0 keeps all.
        adopt_folders: Runs whose folder is taken over if it belongs to another log.
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
                raise InvalidPolicy(f"--{name}", seconds, "seconds")
        if self.keep_checkpoints < 0:
            raise InvalidPolicy("--keep-checkpoints", self.keep_checkpoints, "negative")
        if self.keep_checkpoints > KEPT_COMPLETE_CHECKPOINTS:
            raise InvalidPolicy(
                "--keep-checkpoints", self.keep_checkpoints, "unknown", KEPT_COMPLETE_CHECKPOINTS
            )
