"""Rules between the settings of an algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..rules import (
    Computed,
    Contradictions,
    OnlyWhen,
    Requires,
    Rule,
    SettingCondition,
    SettingConflict,
    Values,
    format_choices,
    is_any,
    is_positive,
)
from ..section import Section
from ..tasks.errors import TaskError
from .built_in import ADVANTAGES, POLICY_LOSSES
from .errors import AlgorithmContradiction
from .presets import PRESETS, converted, merged, preset_values
from .registry import find_advantage, find_policy_loss
from .settings import SCALES, AlgorithmConfig

_SAMPLING = "algorithm.importance_sampling"
_LOSS_IS_FREE = is_any("algorithm.loss", "supervised", "divergence")
"""Losses that take no advantages, and correct for no sampling policy."""
_OWN_ADVANTAGE = is_any("algorithm.advantage", built_in=ADVANTAGES)
_CORRECTS = is_any(f"{_SAMPLING}.weights", "token", "sequence")
_HAS_PENALTY = is_positive("algorithm.kl.coefficient")
_IN_REWARD = is_any("algorithm.kl.where", "reward")
_IS_WEIGHTED = is_any("algorithm.kl.weighted", True)
_DIVIDES_BY_GROUP = SettingCondition(
    ("algorithm.advantage", "algorithm.scale"),
    lambda values: values["algorithm"].divisor == "group",
    "{algorithm.advantage} is divided by the deviation of a group",
    "choose {algorithm.advantage} grpo with {algorithm.scale} group",
)
_DIVIDES = SettingCondition(
    _DIVIDES_BY_GROUP.paths,
    lambda values: values["algorithm"].divisor != "none" or _OWN_ADVANTAGE.is_met(values),
    "{algorithm.advantage} is divided by a deviation",
    "choose an {algorithm.advantage} and a {algorithm.scale} that divide",
)


def _find_unknown_names(values: Values) -> Contradictions:
    checks = (
        ("algorithm.advantage", ADVANTAGES, find_advantage),
        ("algorithm.loss", POLICY_LOSSES, find_policy_loss),
    )
    for path, built_in, find in checks:
        if values[path] not in built_in:  # these load torch, and are there
            try:
                find(values[path])
            except TaskError as error:
                yield (path,), str(error)


def _find_wrong_scale(values: Values) -> Contradictions:
    allowed, scale = SCALES.get(values["algorithm.advantage"]), values["algorithm.scale"]
    if allowed and scale is not None and scale not in allowed:
        yield (
            ("algorithm.advantage", "algorithm.scale"),
            "{=algorithm.advantage} cannot be divided by the deviation of its "
            f"{scale}: {{algorithm.scale}} is {format_choices(allowed)}, or left out",
        )


def _find_masked_everything(values: Values) -> Contradictions:
    low, high = f"{_SAMPLING}.mask_low", f"{_SAMPLING}.mask_high"
    if values[f"{_SAMPLING}.mask"] != "none" and values[low] >= values[high]:
        yield (
            (low, high),
            f"{{={low}}} is not below {{={high}}}: every response would be masked",
        )


RULES: tuple[Rule, ...] = (
    Computed(_find_unknown_names),
    Requires(
        is_any("algorithm.advantage", "gae"),
        is_any("algorithm.critic.use", True),
        "{algorithm.advantage} gae needs the values of a critic",
    ),
    Requires(
        is_any("algorithm.critic.use", True),
        is_any("algorithm.advantage", "gae", built_in=ADVANTAGES),
        "{=algorithm.advantage} uses no critic",
        "set {algorithm.critic.use} false, or {algorithm.advantage} gae",
    ),
    OnlyWhen(
        "algorithm.critic.clip algorithm.critic.learning_rate algorithm.critic.critic_warmup_steps",
        is_any("algorithm.critic.use", True),
        "the run has no critic",
    ),
    OnlyWhen(
        "algorithm.gamma",
        is_any("algorithm.advantage", "gae", "reinforce++", built_in=ADVANTAGES),
        "{=algorithm.advantage} discounts no rewards",
    ),
    OnlyWhen(
        "algorithm.gae_lambda",
        is_any("algorithm.advantage", "gae", built_in=ADVANTAGES),
        "{=algorithm.advantage} has no errors of a critic",
    ),
    Computed(_find_wrong_scale),
    OnlyWhen("algorithm.deviation", _DIVIDES, "{=algorithm.advantage} is not divided here"),
    OnlyWhen(
        "algorithm.deviation_epsilon",
        _DIVIDES_BY_GROUP,
        "it is added to the deviation of a group, by which {=algorithm.advantage} is not divided "
        "here",
    ),
    OnlyWhen(
        "algorithm.options",
        _OWN_ADVANTAGE | is_any("algorithm.loss", built_in=POLICY_LOSSES),
        "a built-in advantage and loss read none",
    ),
    OnlyWhen(
        "algorithm.filters.part",
        is_any("algorithm.filters.zero_variance", "resample"),
        "it is compared when groups are dropped",
    ),
    OnlyWhen(
        "algorithm.overlong.penalty algorithm.overlong.limit",
        is_positive("algorithm.overlong.buffer"),
        "without a buffer no answer has a penalty",
    ),
    OnlyWhen(
        "algorithm.normalisation_length",
        is_any("algorithm.normalisation", "constant"),
        "{=algorithm.normalisation} divides by no constant length",
    ),
    Requires(
        is_any("algorithm.loss", "gspo"),
        # As published. TRL warns of other means (decision 23).
        is_any("algorithm.normalisation", "sequence-mean"),
        "{algorithm.loss} gspo has one ratio for a whole response, which "
        "{=algorithm.normalisation} would weigh by its length",
        "set {algorithm.normalisation} sequence-mean",
    ),
    OnlyWhen(
        "algorithm.clip_low algorithm.clip_high",
        is_any("algorithm.loss", "ppo", "gspo", "cispo", built_in=POLICY_LOSSES),
        "{=algorithm.loss} has no ratio to clip",
    ),
    OnlyWhen(
        "algorithm.dual_clip",
        is_any("algorithm.loss", "ppo", built_in=POLICY_LOSSES),
        "it bounds the ratio of {algorithm.loss} ppo",
    ),
    Requires(
        _LOSS_IS_FREE,
        is_any("algorithm.advantage", "none"),
        "{=algorithm.loss} takes no advantages",
        "set {algorithm.advantage} none",
    ),
    Requires(
        is_any("algorithm.advantage", "none"),
        is_any("algorithm.loss", "supervised", "divergence", built_in=POLICY_LOSSES),
        "{=algorithm.loss} learns nothing from {algorithm.advantage} none",
        "choose an {algorithm.advantage}, or {algorithm.loss} supervised",
    ),
    OnlyWhen(
        "algorithm.kl.estimator algorithm.kl.where algorithm.kl.weighted",
        _HAS_PENALTY,
        "{algorithm.kl.coefficient} 0 has no penalty",
    ),
    Requires(
        # The mean of the gradient of log pi is 0 under pi: see .kl.kl_estimate().
        _HAS_PENALTY & ~_IN_REWARD & is_any("algorithm.kl.estimator", "k1"),
        _IS_WEIGHTED,
        "the gradient of {algorithm.kl.estimator} k1 in the loss is 0 on average",
        "choose k2 or k3, set {algorithm.kl.weighted} true, or {algorithm.kl.where} reward",
    ),
    Requires(
        _HAS_PENALTY & _IS_WEIGHTED,
        ~_IN_REWARD,
        "a reward is fixed before the ratio is known",
        "set {algorithm.kl.weighted} false, or {algorithm.kl.where} loss",
    ),
    Requires(
        _HAS_PENALTY & _IS_WEIGHTED,
        ~is_any("algorithm.loss", "gspo"),
        "{algorithm.loss} gspo has one ratio for a whole response, and {algorithm.kl.weighted} "
        "needs one for each token",
        "set {algorithm.kl.weighted} false",
    ),
    Requires(
        _HAS_PENALTY & _IN_REWARD,
        ~is_any("algorithm.advantage", "none", "teacher"),
        "{=algorithm.advantage} takes no rewards",
        "set {algorithm.kl.where} loss",
    ),
    Requires(
        _LOSS_IS_FREE,
        is_any(f"{_SAMPLING}.ratio_to", "behaviour"),
        "{=algorithm.loss} corrects for no sampling policy",
        f"set {{{_SAMPLING}.ratio_to}} behaviour",
    ),
    OnlyWhen(
        f"{_SAMPLING}.weights {_SAMPLING}.mask",
        ~_LOSS_IS_FREE,
        "{=algorithm.loss} corrects for no sampling policy",
    ),
    Requires(
        # A weight pi/mu times a ratio pi/mu would correct twice.
        _CORRECTS & is_any("algorithm.loss", "ppo", "gspo", "cispo", built_in=POLICY_LOSSES),
        is_any(f"{_SAMPLING}.ratio_to", "proximal"),
        "the ratio of {=algorithm.loss} to the behaviour policy corrects already",
        f"set {{{_SAMPLING}.ratio_to}} proximal, or {{{_SAMPLING}.weights}} none",
    ),
    OnlyWhen(f"{_SAMPLING}.cap", _CORRECTS, f"{{{_SAMPLING}.weights}} none are not truncated"),
    OnlyWhen(
        f"{_SAMPLING}.mask_low {_SAMPLING}.mask_high",
        is_any(f"{_SAMPLING}.mask", "icepop", "geometric", "sequence"),
        f"{{{_SAMPLING}.mask}} none has no bounds",
    ),
    Computed(_find_masked_everything),
    Requires(
        is_any("algorithm.loss", "gspo"),
        ~is_any(f"{_SAMPLING}.weights", "token"),
        "{algorithm.loss} gspo has one ratio for a whole response",
        f"set {{{_SAMPLING}.weights}} sequence or none",
    ),
    Requires(
        is_any(f"{_SAMPLING}.mask", "icepop"),
        ~is_any(f"{_SAMPLING}.weights", "sequence"),
        f"{{{_SAMPLING}.mask}} icepop judges single tokens, and {{{_SAMPLING}.weights}} sequence "
        "weighs whole responses",
        f"set {{{_SAMPLING}.mask}} sequence or geometric, or {{{_SAMPLING}.weights}} token",
    ),
    OnlyWhen(
        "algorithm.teacher.divergence",
        is_any("algorithm.loss", "divergence"),
        "{=algorithm.loss} computes none",
    ),
    OnlyWhen(
        "algorithm.teacher.mixture",
        is_any("algorithm.teacher.divergence", "jensen-shannon"),
        "{=algorithm.teacher.divergence} mixes nothing",
    ),
)
"""Rules of an algorithm alone, as an own loop has it too."""


class _AlgorithmAlone(Section, frozen=True, kw_only=True):
    """Configuration of an own loop: an algorithm."""

    algorithm: AlgorithmConfig


def read_settings(values: Mapping[str, Any]) -> AlgorithmConfig:
    """Return the settings of nested values, laid over those of the preset that they name.

    Raises:
        AlgorithmError: if a name or a value is wrong, or settings contradict each other; with the
            first mistake, in one sentence.
    """
    preset = values.get("preset")
    config = converted(merged({} if preset is None else preset_values(preset), values))
    for contradiction in find_contradictions(config):
        raise AlgorithmContradiction(*contradiction)
    return config


def get_defaults(preset: str | None) -> AlgorithmConfig:
    """Return the settings of a preset that nothing is laid over; the defaults for no preset."""
    return converted(PRESETS.get(preset or "", {}))


def find_contradictions(config: AlgorithmConfig) -> Iterator[SettingConflict]:
    """Yield what contradicts itself in settings, whose names have no section."""
    defaults = _AlgorithmAlone(algorithm=get_defaults(config.preset))
    named = _AlgorithmAlone(algorithm=config)
    values = Values(named, defaults, lambda path: path.removeprefix("algorithm."))
    for rule in RULES:
        yield from rule.find(values)
