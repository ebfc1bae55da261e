"""Settings of a run's dispatcher."""

from __future__ import annotations

from typing import ClassVar, Literal

from msgspec import Struct

from trinity_schemas import Sampling

from ..errors import StructuredError
from .experience_checks import NO_LIMITS, AnswerLimits

_ID_BYTES = _LOGPROB_BYTES = 4
"""Bytes of a token id in the widest array, and of a log-probability."""
_TEXT_BYTES = 4
"""Bytes of the text of a token on average, which goes with those of prompts and environments."""
_SAMPLE_BYTES = 1024
"""Bytes of a sample beyond its tokens: its names, a few parts of the reward, the stream's entry."""


class InvalidDispatchSetting(StructuredError, ValueError):
    """A setting of the dispatcher cannot work.

    Attributes:
        name: Name of the setting.
        value: Its value.
        fault: ``count`` below 1, ``seconds`` that are not above 0, ``window`` below a step's, or
            ``bytes`` below those of a step.
        least: Prompts of a step, or the bytes that their answers may have.
    """

    name: str
    value: float
    fault: Literal["count", "seconds", "window", "bytes"]
    least: int = 1
    texts: ClassVar = {
        "count": "{name} is {value}: it must be at least {least}",
        "seconds": "{name} is {value}: it must be above 0 seconds",
        "window": "{name} is {value}: it must be at least prompts_per_step, {least}, or no step "
        "gets its groups",
        "bytes": "{name} is {value:,}, and the answers of one step may have {least:,} bytes: "
        "choose at least that, fewer samples or shorter answers",
    }


def find_answer_bytes(
    samples: int, *, sampled_tokens: int, prompt_tokens: int = 0, other_tokens: int = 0
) -> int:
    """Return the maximum bytes of the answer to one request, as the contract packs it.

    Args:
        samples: Samples of the group, which share a prompt.
        sampled_tokens: Maximum tokens of the policy in a sample, each with its log-probability.
        prompt_tokens: Maximum tokens of the prompt.
        other_tokens: Maximum tokens of an environment in a sample.
    """
    # The widest form of the contract: ids are packed as narrow as the vocabulary allows.
    of_sample = _SAMPLE_BYTES + (_ID_BYTES + _LOGPROB_BYTES) * sampled_tokens
    other = _ID_BYTES + _TEXT_BYTES
    return samples * (of_sample + other * other_tokens) + other * prompt_tokens


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
    max_bytes: int | None = None
    """Maximum bytes of answers on the server, with those that requests may still bring. A step that
    waits requests its own prompts in any case. None bounds the window alone."""
    answer_bytes: int = 0
    """Maximum bytes of the answer to one request: see :func:`find_answer_bytes`."""
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
    outage_timeout: float = 3600.0
    """Seconds for which the dispatch pauses while what answers depend on fails for all of them."""
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
        for name in ("claim_lease", "request_deadline", "outage_timeout"):
            # Written so that NaN is refused too.
            if not getattr(self, name) > 0:
                raise InvalidDispatchSetting(name, getattr(self, name), "seconds")
        step_bytes = self.prompts_per_step * self.answer_bytes
        # Below it the bound cannot hold: a step requests its own prompts in any case.
        if self.max_bytes is not None and self.max_bytes < max(step_bytes, 1):
            least = max(step_bytes, 1)
            raise InvalidDispatchSetting("max_bytes", self.max_bytes, "bytes", least)
        if self.window < self.prompts_per_step:
            raise InvalidDispatchSetting("window", self.window, "window", self.prompts_per_step)
