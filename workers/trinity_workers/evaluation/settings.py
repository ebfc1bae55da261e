"""Settings of evaluation while training."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from trinity_schemas.rollouts import MAX_REWARD

from ..section import Section

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""Names that a set may have; they stand in the names of metrics."""


class EvaluationSet(Section, frozen=True, kw_only=True):
    """A set of held-out questions, its sampling, and the versions that it is asked of."""

    questions: str | None = None
    """Source of the questions, as of `task.questions`. Null takes the task's held-out ones."""
    count: Positive = 256
    """Maximum number of questions; the first ones of the set are asked."""
    samples: Positive = 4
    """Answers that are sampled to each question."""
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    """Temperature of sampling; 0 takes the most likely token."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Probability mass of the most likely tokens that are sampled from."""
    top_k: NotNegative = 0
    """Number of the most likely tokens that are sampled from; 0 samples from all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Least probability of a token that is sampled, as a share of the most likely token's."""
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    """Divisor of the positive logits of tokens that occurred, in the prompt too; their negative
    logits are multiplied by it."""
    max_new_tokens: Positive | None = None
    """Tokens after which an answer is cut off. Null is `rollouts.max_new_tokens`."""
    pass_at: tuple[Positive, ...] | None = None
    """Numbers k of answers of which pass@k asks whether one is right. Null is 1 and `samples`."""
    correct_from: Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)] = 1.0
    """Reward from which an answer counts as right, for pass@k."""
    interval: NotNegative = 0
    """Steps between two evaluations; the first version from each multiple on is evaluated. 0 leaves
    them out."""
    versions: tuple[NotNegative, ...] = ()
    """Steps whose weights are evaluated, or else the next version after them."""
    at_start: bool | None = None
    """Evaluate the weights that the run begins with. Null does, if the sync method keeps them."""
    at_end: bool = True
    """Evaluate the weights of the last step."""

    @property
    def passes(self) -> tuple[int, ...]:
        """Numbers k of pass@k, ascending."""
        return tuple(sorted({1, self.samples} if self.pass_at is None else set(self.pass_at)))


class EvaluationConfig(Section, frozen=True, kw_only=True):
    """Evaluation of weight versions on held-out questions, beside training."""

    sets: dict[str, EvaluationSet] = msgspec.field(
        default_factory=lambda: {"held-out": EvaluationSet()}
    )
    """Sets by name; `{}` evaluates nothing. The default is one set `held-out`, at start and end."""
    timeout: Annotated[float, Meta(gt=0)] = 600.0
    """Seconds without all answers to the 64 questions asked, after which an evaluation fails."""
