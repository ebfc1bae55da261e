"""Settings of an algorithm; without torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, structs

from ..section import Section
from .built_in import ADVANTAGES, POLICY_LOSSES

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]
AbovePositive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

Normalisation = Literal["token-mean", "sequence-mean", "sequence-mean-token-sum", "constant"]
Scale = Literal["group", "batch", "none"]

DEVIATION_EPSILON = 1e-4
"""Value of TRL's `GRPOTrainer`: rewards that differ by 1e-5, by a reward model's noise for example,
have advantages below 0.1 then. With veRL's 1e-6 these are near 1."""


class KLConfig(Section, frozen=True, kw_only=True):
    """Penalty for the distance from a reference policy."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence of a sampled token."""
    coefficient: NotNegative = 0.0
    """Weight of the penalty; 0 needs no reference."""
    where: Literal["loss", "reward"] = "loss"
    """Place of the penalty: added to the loss, or subtracted from the reward of each token."""
    weighted: bool = False
    """In the loss, weigh the penalty by the ratio of probabilities: its gradient is then unbiased
    on samples of the old policy."""


class ImportanceSamplingConfig(Section, frozen=True, kw_only=True):
    """Correction for the policy that sampled, as its engine computed it."""

    ratio_to: Literal["behaviour", "proximal"] = "behaviour"
    """Denominator of the clipped ratio: the policy that sampled, or the trainer's own before the
    step, by its own log-probabilities (decoupled)."""
    weights: Literal["none", "token", "sequence"] = "none"
    """Weights of proximal to behaviour probability: of each token, or of the whole response."""
    cap: AbovePositive | None = 2.0
    """Value at which weights are truncated; null truncates none."""
    mask: Literal["none", "icepop", "geometric", "sequence"] = "none"
    """Ratio that must be within bounds, or the loss is 0: the token's (IcePop), the response's
    geometric mean, or the response's product."""
    mask_low: NotNegative = 0.5
    """Lower bound of the mask."""
    mask_high: AbovePositive = 5.0
    """Upper bound of the mask."""


class FiltersConfig(Section, frozen=True, kw_only=True):
    """Groups that teach nothing."""

    zero_variance: Literal["keep", "mask", "resample"] = "keep"
    """Groups of equal rewards: keep them, leave them out of sums and counts, or drop them and
    take the next prompts (dynamic sampling)."""
    part: str | None = None
    """Named part of the reward that is compared when groups are dropped. Null compares rewards."""

    @property
    def needed_part(self) -> str | None:
        """Return the part of the reward that each answer needs, if it needs one."""
        return self.part if self.zero_variance == "resample" else None


class OverlongConfig(Section, frozen=True, kw_only=True):
    """Responses that meet their limit of tokens."""

    mask: bool = False
    """Train on none of their tokens; their rewards still count in their groups."""
    buffer: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Last share of the limit, in which a penalty grows from 0; 0 gives no penalty."""
    penalty: NotNegative = 1.0
    """Penalty at the limit, which is subtracted from the reward."""
    limit: Positive | None = None
    """Limit in tokens. Null takes `rollouts.max_new_tokens`."""


class CriticConfig(Section, frozen=True, kw_only=True):
    """Critic, which estimates the value of each token."""

    use: bool = False
    """Train a critic beside the policy, as advantage gae needs it."""
    clip: AbovePositive | None = 0.2
    """Distance that a value may go from the old one before its loss stops; null does not clip."""
    learning_rate: NotNegative | None = None
    """Learning rate of the critic, with the warm-up and the schedule of the trainer's. Null takes
    `trainer.learning_rate`."""
    critic_warmup_steps: Annotated[int, Meta(ge=0)] = 0
    """First steps, in which the critic alone is trained. veRL calls it `critic_warmup`."""


class TeacherConfig(Section, frozen=True, kw_only=True):
    """Teacher of an on-policy distillation."""

    path: str | None = None
    """Hugging Face folder of the teacher, with the tokenizer of the policy; on FSDP."""
    divergence: Literal["forward", "reverse", "jensen-shannon"] = "reverse"
    """Divergence of loss divergence: KL(teacher || policy), which covers the teacher; KL(policy ||
    teacher), which seeks its modes; or of both to their mixture."""
    mixture: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Share of the teacher in the mixture of jensen-shannon."""


class AlgorithmConfig(Section, frozen=True, kw_only=True):
    """Algorithm: advantages of tokens, the policy's loss, and their corrections."""

    preset: str | None = None
    """Published algorithm whose settings are the defaults: grpo, dr_grpo, dapo, rloo, reinforce++,
    reinforce++-baseline, ppo, gspo, cispo, distillation or supervised."""
    advantage: str = "grpo"
    """Estimator of advantages: a built-in one, an entry point, `module:attribute` or
    `./file.py:attribute`."""
    scale: Scale | None = None
    """Deviation that advantages are divided by: their group's, the batch's or none. Null takes the
    estimator's own."""
    deviation: Literal["population", "sample"] = "population"
    """Deviations are divided by n, or by n - 1."""
    deviation_epsilon: NotNegative = DEVIATION_EPSILON
    """Number that is added to the deviation of a group, in advantage grpo with scale group. TRL
    adds 1e-4, veRL 1e-6."""
    gamma: Share = 1.0
    """Discount of rewards, by token."""
    gae_lambda: Share = 1.0
    """Decay of later errors of the critic, by token; of advantage gae."""
    loss: str = "ppo"
    """Loss of the policy: a built-in one, an entry point, `module:attribute` or
    `./file.py:attribute`."""
    normalisation: Normalisation = "token-mean"
    """Mean that the loss is: over tokens; over responses, each the mean or the sum of its tokens;
    or the sum divided by responses times a constant length."""
    normalisation_length: Positive | None = None
    """Length of normalisation constant. Null takes `rollouts.max_new_tokens`."""
    epochs: Positive = 1
    """Passes over the batch of a step. veRL calls it `ppo_epochs`, TRL `num_iterations`."""
    mini_batches: Positive = 1
    """Parts of the batch in each pass, with an update of the policy for each."""
    clip_low: Share = 0.2
    """Distance below 1 at which the ratio of probabilities is clipped."""
    clip_high: AbovePositive = 0.2
    """Distance above 1 at which the ratio of probabilities is clipped."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """Ratio above which a negative advantage pushes no further; null has no such bound."""
    entropy_coefficient: NotNegative = 0.0
    """Weight of the entropy, which is rewarded."""
    kl: KLConfig = KLConfig()
    importance_sampling: ImportanceSamplingConfig = ImportanceSamplingConfig()
    filters: FiltersConfig = FiltersConfig()
    overlong: OverlongConfig = OverlongConfig()
    critic: CriticConfig = CriticConfig()
    teacher: TeacherConfig = TeacherConfig()
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options for an advantage or a loss of your own."""

    @property
    def divisor(self) -> Scale:
        """Deviation that advantages are divided by, the estimator's own if none is set."""
        if self.scale is not None:
            return self.scale
        scales = SCALES.get(self.advantage)
        return scales[0] if scales else "none"

    @property
    def needed_fields(self) -> frozenset[str]:
        """Return the fields of a batch that the trainer computes before an update."""
        sampling = self.importance_sampling
        needs = {
            "proximal_logprobs": sampling.ratio_to == "proximal",
            "reference_logprobs": self.kl.coefficient > 0,
            "teacher_logprobs": self.advantage == "teacher",
            "values": self.critic.use,
        }
        return frozenset(name for name, needed in needs.items() if needed)

    @property
    def needs_teacher(self) -> bool:
        """Return True if the advantage or the loss compares with a teacher."""
        return self.advantage == "teacher" or self.loss == "divergence"

    @property
    def updates(self) -> int:
        """Return the updates of a step."""
        return self.epochs * self.mini_batches

    @property
    def needs_proximal_to_prepare(self) -> bool:
        """Return True if proximal log-probabilities are needed before the batch is prepared."""
        # An advantage of a user may read any field.
        prepared = self.advantage == "teacher" or self.advantage not in ADVANTAGES
        penalty = self.kl.coefficient > 0 and self.kl.where == "reward"
        return "proximal_logprobs" in self.needed_fields and (prepared or penalty)

    @property
    def needs_proximal_pass(self) -> bool:
        """Return True if a pass before the updates computes the proximal log-probabilities."""
        # With one update its own forward pass gives them: see TrainingStep._policy_loss().
        return self.updates > 1 or self.needs_proximal_to_prepare

    @property
    def has_own_loss(self) -> bool:
        """Return True if the loss is a user's, which may fail on one rank alone."""
        return self.loss not in POLICY_LOSSES

    def with_limit(self, max_new_tokens: int) -> AlgorithmConfig:
        """Return the settings with the run's limit of tokens where they have none of their own."""
        overlong = structs.replace(self.overlong, limit=self.overlong.limit or max_new_tokens)
        return structs.replace(
            self,
            overlong=overlong,
            normalisation_length=self.normalisation_length or max_new_tokens,
        )


SCALES: dict[str, tuple[Scale, ...]] = {
    "grpo": ("group", "batch", "none"),
    "rloo": ("none",),
    "reinforce++": ("batch", "none"),
    "reinforce++-baseline": ("batch", "none"),
    "gae": ("batch", "none"),
    "teacher": ("none",),
    "none": ("none",),
}
"""Built-in advantages, and the deviations that they can be divided by: their own first."""
