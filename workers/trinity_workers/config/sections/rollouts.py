"""Section `rollouts`: requests of each step, and how answers are sampled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from trinity_schemas import PauseMode

from ...section import Section
from ..types import NotNegative, Positive, Seconds

StopString = Annotated[str, Meta(min_length=1, max_length=256)]


class RolloutsConfig(Section, frozen=True, kw_only=True):
    """Rollouts: what is asked for in each step, and how it is sampled."""

    prompts_per_step: Positive = 16
    """Prompts whose groups of answers one training step takes."""
    samples_per_prompt: Positive = 16
    """Answers sampled for each prompt; they are one group."""
    max_new_tokens: Positive = 7
    """Tokens after which an answer is cut off."""
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    """Temperature of sampling."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Probability mass of the most likely tokens that are sampled from."""
    top_k: NotNegative = 0
    """Number of the most likely tokens that are sampled from; 0 samples from all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Least probability of a token that is sampled, as a share of the most likely token's."""
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    """Divisor of the positive logits of tokens that occurred, in the prompt too; their negative
    logits are multiplied by it."""
    stop: tuple[StopString, ...] = ()
    """Strings that end a turn of the policy, in training and in evaluations. Their tokens are
    trained on."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text that rewards and environments read."""
    max_prompt_tokens: Positive | None = None
    """Maximum number of tokens of a prompt. A longer one is dropped as `overlong` before it is
    requested. Null leaves room for one token of an answer."""
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options that are given to the chat template by name, such as `{enable_thinking: false}`."""
    max_turns: Positive = 1
    """Turns of the policy after which an episode with an environment ends."""
    order: Literal["ordinal", "arrival"] = "ordinal"
    """Groups that a step takes: those of the lowest ordinals, or those that arrive first."""
    window: Positive | None = None
    """Maximum number of prompts that are open at a time. Null is twice the prompts in flight."""
    max_bytes: Positive | None = None
    """Maximum bytes of answers on the server, with those that requests may still bring. Beyond it
    no prompt is asked for ahead of its step. Null bounds the prompts alone."""
    claim_lease: Seconds = 10.0
    """Seconds after which the requests of an explorer that is silent are issued again."""
    request_deadline: Seconds = 300.0
    """Seconds after which a claimed request is issued again, however lively its explorer is."""
    max_attempts: Positive = 3
    """Failed attempts after which a prompt is dropped. A failed reward is not tried again: see
    `rewards.on_error`."""
    max_consecutive_failures: Positive = 10
    """Requests in a row whose rewards failed that end the run, whatever `rewards.on_error` is.
    Failed requests in a row of one explorer exclude it, while others answer."""
    outage_timeout: Seconds = 3600.0
    """Seconds for which a run waits for a reward service, a judge, an environment or the sandbox of
    code that worked and fails for every request. No attempt is spent and no prompt dropped."""
    pause_mode: PauseMode = "wait"
    """Treatment of answers that are being generated when a weight version arrives. `wait` ends them
    with the old version first. `keep` continues them with the new one and the old one's key-value
    cache, `retract` with the new one and a new cache of the same tokens; each token has its
    version. `abort` gives them back, and they are begun again with the new version."""
    keep_answers: Literal["trained", "checkpoint"] = "trained"
    """Moment at which answers are deleted: their step is trained, or a checkpoint covers it. With
    the latter, a resumed run trains on them again and generates nothing twice; it needs a
    `checkpoints.interval`."""
