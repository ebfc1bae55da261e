"""Settings of an algorithm, its presets, and contradictions in them; without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, structs

from ..section import Section
from .errors import AlgorithmError
from .registry import ADVANTAGES, POLICY_LOSSES, find_advantage, find_policy_loss

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]
AbovePositive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

Normalisation = Literal["token-mean", "sequence-mean", "sequence-mean-token-sum", "constant"]
Scale = Literal["group", "batch", "none"]

_DEVIATION_EPSILON = 1e-4
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
    """Learning rate of the critic, with the ramp and the schedule of the trainer's. Null takes
    `trainer.learning_rate`."""
    warmup_steps: Annotated[int, Meta(ge=0)] = 0
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
    deviation_epsilon: NotNegative = _DEVIATION_EPSILON
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
    def asks_teacher(self) -> bool:
        """Return True if the advantage or the loss compares with a teacher."""
        return self.advantage == "teacher" or self.loss == "divergence"

    @property
    def updates(self) -> int:
        """Return the updates of a step."""
        return self.epochs * self.mini_batches

    @property
    def prepares_by_proximal(self) -> bool:
        """Return True if proximal log-probabilities are needed before the batch is prepared."""
        prepared = self.advantage == "teacher" or self.advantage not in ADVANTAGES
        penalty = self.kl.coefficient > 0 and self.kl.where == "reward"
        return "proximal_logprobs" in self.needed_fields and (prepared or penalty)

    @property
    def passes_proximal(self) -> bool:
        """Return True if a pass before the updates computes the proximal log-probabilities."""
        return self.updates > 1 or self.prepares_by_proximal

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

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {"normalisation": "sequence-mean"},
    "dr_grpo": {"scale": "none", "normalisation": "constant"},
    "dapo": {
        "clip_high": 0.28,
        "filters": {"zero_variance": "resample"},
        "overlong": {"buffer": 0.2},
    },
    "rloo": {
        "advantage": "rloo",
        "normalisation": "sequence-mean-token-sum",
        "kl": {"estimator": "k1", "where": "reward"},
    },
    "reinforce++": {"advantage": "reinforce++", "kl": {"estimator": "k1", "where": "reward"}},
    "reinforce++-baseline": {"advantage": "reinforce++-baseline", "kl": {"estimator": "k2"}},
    "ppo": {
        "advantage": "gae",
        "gae_lambda": 0.95,
        "critic": {"use": True},
        "kl": {"estimator": "k1", "where": "reward"},
    },
    "gspo": {
        "loss": "gspo",
        "normalisation": "sequence-mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "distillation": {"advantage": "teacher"},
    "supervised": {"advantage": "none", "loss": "supervised"},
}
"""Settings of each preset; all others have their defaults. docs/algorithms.md has the sources."""


def read_settings(values: Mapping[str, Any]) -> AlgorithmConfig:
    """Return the settings of nested values, laid over those of the preset that they name.

    Raises:
        AlgorithmError: if a name or a value is wrong, or settings contradict each other; with the
            first mistake, in one sentence.
    """
    preset = values.get("preset")
    config = converted(merged({} if preset is None else preset_values(preset), values))
    for _, sentence in contradictions(config):
        raise AlgorithmError(sentence)
    return config


def preset_values(name: str) -> dict[str, Any]:
    """Return the settings of a preset, nested. Raises AlgorithmError if there is none."""
    if name not in PRESETS:
        near = get_close_matches(str(name), PRESETS, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise AlgorithmError(
            f"unknown preset {name!r}: {meant}the presets are {', '.join(PRESETS)}"
        )
    return PRESETS[name]


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values with others laid over them, section by section."""
    values = dict(below)
    for name, value in above.items():
        under = values.get(name)
        nested = isinstance(value, Mapping) and isinstance(under, Mapping)
        values[name] = merged(under, value) if nested else value  # type: ignore[arg-type]
    return values


def converted(values: Mapping[str, Any]) -> AlgorithmConfig:
    """Return nested values as settings. Raises AlgorithmError, in one sentence."""
    try:
        return msgspec.convert(values, AlgorithmConfig)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        where = f"algorithm{place.rstrip('`')}"
        raise AlgorithmError(f"{where} cannot be used: {reason}") from None


def contradictions(
    config: AlgorithmConfig,
    named: Callable[[str], str] = lambda name: name,
    samples: int | None = None,
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what contradicts itself in settings: the fields' paths, and a sentence.

    Args:
        config: The settings.
        named: Names a field, given by its path below the algorithm, in the sentences.
        samples: Samples of each prompt, if they are known.
    """
    yield from _of_names(config)
    yield from _of_advantages(config, named, samples)
    yield from _of_the_loss(config, named)
    yield from _of_the_penalty(config, named)
    yield from _of_the_correction(config, named)


_Found = Iterator[tuple[tuple[str, ...], str]]
_COMPARING = ("grpo", "rloo", "reinforce++-baseline")
"""Advantages that compare the samples of a prompt."""
_RATIO_FREE = ("supervised", "divergence", "reinforce")
"""Losses without a ratio of probabilities."""
_REWARD_FREE = ("supervised", "divergence")
"""Losses that take no advantages."""


def _of_names(config: AlgorithmConfig) -> _Found:
    checks = (
        ("advantage", config.advantage, ADVANTAGES, find_advantage),
        ("loss", config.loss, POLICY_LOSSES, find_policy_loss),
    )
    for field, name, built_in, find in checks:
        if name not in built_in:  # these load torch, and are there
            try:
                find(name)
            except AlgorithmError as error:
                yield (field,), str(error)


def _of_advantages(
    config: AlgorithmConfig, named: Callable[[str], str], samples: int | None
) -> _Found:
    advantage, use, scale = named("advantage"), named("critic.use"), named("scale")
    if config.advantage == "gae" and not config.critic.use:
        yield (
            ("advantage", "critic.use"),
            f"{advantage} gae needs the values of a critic: set {use} true, or choose another "
            f"{advantage}",
        )
    if config.critic.use and config.advantage in SCALES and config.advantage != "gae":
        yield (
            ("advantage", "critic.use"),
            f"{advantage} {config.advantage} uses no critic: set {use} false, or {advantage} gae",
        )
    allowed = SCALES.get(config.advantage)
    if allowed and config.scale is not None and config.scale not in allowed:
        yield (
            ("advantage", "scale"),
            f"{advantage} {config.advantage} cannot be divided by the deviation of its "
            f"{config.scale}: {scale} is {' or '.join(allowed)}, or left out",
        )
    if config.deviation_epsilon != _DEVIATION_EPSILON and config.divisor != "group":
        yield (
            ("deviation_epsilon", "advantage", "scale"),
            f"{named('deviation_epsilon')} is added to the deviation of a group, by which "
            f"{advantage} {config.advantage} is not divided here: leave it out, or choose "
            f"{advantage} grpo with {scale} group",
        )
    if samples == 1 and config.advantage in _COMPARING:
        yield (
            ("advantage",),
            f"{advantage} {config.advantage} compares the samples of a prompt, and there is one: "
            "ask for at least two samples of each prompt",
        )
    if samples == 1 and config.filters.zero_variance != "keep":
        yield (
            ("filters.zero_variance",),
            f"{named('filters.zero_variance')} {config.filters.zero_variance} leaves out every "
            "group of one sample: ask for at least two, or set it to keep",
        )
    if config.filters.part is not None and config.filters.zero_variance != "resample":
        yield (
            ("filters.part", "filters.zero_variance"),
            f"{named('filters.part')} is compared when groups are dropped: set "
            f"{named('filters.zero_variance')} resample, or leave it out",
        )


def _of_the_loss(config: AlgorithmConfig, named: Callable[[str], str]) -> _Found:
    loss, dual = named("loss"), named("dual_clip")
    if config.loss == "gspo" and config.normalisation != "sequence-mean":
        yield (
            ("loss", "normalisation"),
            f"{loss} gspo has one ratio for a whole response, which {config.normalisation} would "
            f"weigh by its length: set {named('normalisation')} sequence-mean",
        )
    if config.dual_clip is not None and config.loss in {"gspo", "cispo", *_RATIO_FREE}:
        yield (
            ("loss", "dual_clip"),
            f"{dual} bounds the ratio of {loss} ppo, and {config.loss} has none: leave it out",
        )
    if config.loss == "supervised" and config.advantage != "none":
        yield (
            ("loss", "advantage"),
            f"{loss} supervised takes no advantages: set {named('advantage')} none",
        )
    if config.loss == "divergence" and config.advantage != "none":
        yield (
            ("loss", "advantage"),
            f"{loss} divergence takes no advantages: set {named('advantage')} none",
        )
    if config.advantage == "none" and config.loss in {"ppo", "gspo", "cispo", "reinforce"}:
        yield (
            ("loss", "advantage"),
            f"{loss} {config.loss} learns nothing from {named('advantage')} none: choose an "
            f"advantage, or {loss} supervised",
        )


def _of_the_penalty(config: AlgorithmConfig, named: Callable[[str], str]) -> _Found:
    kl = config.kl
    if not kl.coefficient:
        return
    where, weighted = named("kl.where"), named("kl.weighted")
    if kl.where == "loss" and kl.estimator == "k1" and not kl.weighted:
        yield (
            ("kl.where", "kl.estimator", "kl.weighted"),
            f"the gradient of {named('kl.estimator')} k1 in the loss is 0 on average: choose k2 "
            f"or k3, set {weighted} true, or {where} reward",
        )
    if kl.where == "reward" and kl.weighted:
        yield (
            ("kl.where", "kl.weighted"),
            f"a reward is fixed before the ratio is known: set {weighted} false, or {where} loss",
        )
    if kl.weighted and config.loss == "gspo":
        yield (
            ("kl.weighted", "loss"),
            f"{named('loss')} gspo has one ratio for a whole response, and {weighted} needs one "
            f"for each token: set {weighted} false",
        )
    if kl.where == "reward" and config.advantage in {"none", "teacher"}:
        yield (
            ("kl.where", "advantage"),
            f"{named('advantage')} {config.advantage} takes no rewards: set {where} loss",
        )


def _of_the_correction(config: AlgorithmConfig, named: Callable[[str], str]) -> _Found:
    sampling = config.importance_sampling
    ratio_to, weights = (
        named("importance_sampling.ratio_to"),
        named("importance_sampling.weights"),
    )
    mask = named("importance_sampling.mask")
    loss = named("loss")
    corrects = sampling.weights != "none" or sampling.mask != "none"
    if config.loss in _REWARD_FREE and (corrects or sampling.ratio_to == "proximal"):
        yield (
            ("loss", "importance_sampling.weights", "importance_sampling.mask"),
            f"{loss} {config.loss} corrects for no sampling policy: set {weights} and {mask} none, "
            f"and {ratio_to} behaviour",
        )
    elif (
        sampling.weights != "none"
        and sampling.ratio_to == "behaviour"
        and config.loss not in _RATIO_FREE
    ):
        yield (
            ("loss", "importance_sampling.weights", "importance_sampling.ratio_to"),
            f"the ratio of {loss} {config.loss} to the behaviour policy corrects already: set "
            f"{ratio_to} proximal, or {weights} none",
        )
    if config.loss == "gspo" and sampling.weights == "token":
        yield (
            ("loss", "importance_sampling.weights"),
            f"{loss} gspo has one ratio for a whole response: set {weights} sequence or none",
        )
    if sampling.mask != "none" and sampling.mask_low >= sampling.mask_high:
        low, high = (
            named("importance_sampling.mask_low"),
            named("importance_sampling.mask_high"),
        )
        yield (
            ("importance_sampling.mask_low", "importance_sampling.mask_high"),
            f"{low} {sampling.mask_low:g} is not below {high} {sampling.mask_high:g}: every "
            "response would be masked",
        )
    if sampling.mask == "icepop" and sampling.weights == "sequence":
        yield (
            ("importance_sampling.mask", "importance_sampling.weights"),
            f"{mask} icepop judges single tokens, and {weights} sequence weighs whole responses: "
            f"set {mask} sequence or geometric, or {weights} token",
        )
