"""Settings of a run's dispatcher."""

from __future__ import annotations

from typing import ClassVar, Literal

from msgspec import Struct

from trinity_schemas import Sampling

from ..errors import StructuredError
from .experience_checks import NO_LIMITS, AnswerLimits


class InvalidDispatchSetting(StructuredError, ValueError):
    """A setting of the dispatcher cannot work.

    Attributes:
        name: Name of the setting.
        value: Its value.
        fault: ``count`` below 1, ``seconds`` that are not above 0, or ``window`` below a step's.
        least: Prompts of a step.
    """

    name: str
    value: float
    fault: Literal["count", "seconds", "window"]
    least: int = 1
    texts: ClassVar = {
        "count": "{name} is {value}: it must be at least {least}",
        "seconds": "{name} is {value}: it must be above 0 seconds",
        "window": "{name} is {value}: it must be at least prompts_per_step, {least}, or no step "
        "gets its groups",
    }


class DispatchSettings(Struct, frozen=True, kw_only=True):
    """Settings of a run's dispatcher."""

    run_id: str
    epoch: int
    samples: int
    """Samples of a group."""
    sampling: Sampling
    limits: AnswerLimits = NO_LIMITS
    """Limits of answers that the run's model and task have."""
    prompts_per_step: int
    fingerprint: str
    """Fingerprint of the task set."""
    order: Literal["ordinal", "arrival"] = "ordinal"
    """Groups that a step takes: those of the lowest ordinals, or those that arrive first."""
    window: int
    """Maximum number of ordinals that are open at a time."""
    claim_lease: float = 10.0
    """Seconds after which a claim that is not renewed lapses."""
    request_deadline: float = 300.0
    """Seconds from its claim after which a request is issued again, however often renewed."""
    max_attempts: int = 3
    """Failed attempts after which an ordinal is dropped; a stale answer is no failed attempt."""
    on_reward_error: Literal["fail", "drop_group", "score"] = "fail"
    """Effect of a reward that failed: it ends the dispatch, or its ordinal is dropped. With
    ``score`` explorers send a configured score in its place; a request that one gives back for its
    reward all the same is dropped."""
    max_consecutive_failures: int | None = 10
    """Requests in a row whose reward failed that end the dispatch. So many failed requests in a row
    of one explorer exclude it, if others answer. None counts neither."""
    may_drop: bool = True
    """False fails the dispatch with the first ordinal that would be dropped for its attempts."""
    when_stale: Literal["drop", "wait", "pace"] = "drop"
    """With ``wait``, a step of groups that arrive first takes those before that later steps could
    not use in time, and waits for them. Groups that are too old are asked for again in any case."""
    keep_answers: Literal["trained", "checkpoint"] = "trained"
    """Moment from which an answer is deleted: its step is trained, or a checkpoint covers it."""
    discards_earlier: bool = False
    """True to delete the answers of earlier epochs, whose rewards are not those of this one."""

    idle_member: float = 60.0
    """Seconds without a request and without a claim after which an explorer leaves the group."""

    def __post_init__(self) -> None:
        for name in ("samples", "prompts_per_step", "window", "max_attempts"):
            if getattr(self, name) < 1:
                raise InvalidDispatchSetting(name, getattr(self, name), "count")
        failures = self.max_consecutive_failures
        if failures is not None and failures < 1:
            raise InvalidDispatchSetting("max_consecutive_failures", failures, "count")
        for name in ("claim_lease", "request_deadline"):
            if not getattr(self, name) > 0:
                raise InvalidDispatchSetting(name, getattr(self, name), "seconds")
        if self.window < self.prompts_per_step:
            raise InvalidDispatchSetting("window", self.window, "window", self.prompts_per_step)
