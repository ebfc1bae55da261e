"""Rules between the settings of an algorithm: contradictions, with the way out of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .built_in import ADVANTAGES, POLICY_LOSSES
from .errors import AlgorithmError
from .presets import converted, merged, preset_values
from .registry import find_advantage, find_policy_loss
from .settings import DEVIATION_EPSILON, SCALES, AlgorithmConfig


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
    yield from _check_names(config)
    yield from _check_advantages(config, named, samples)
    yield from _check_loss(config, named)
    yield from _check_kl_penalty(config, named)
    yield from _check_importance_sampling(config, named)


_Found = Iterator[tuple[tuple[str, ...], str]]
_COMPARING = ("grpo", "rloo", "reinforce++-baseline")
"""Advantages that compare the samples of a prompt."""
_RATIO_FREE = ("supervised", "divergence", "reinforce")
"""Losses without a ratio of probabilities."""
_REWARD_FREE = ("supervised", "divergence")
"""Losses that take no advantages."""


def _check_names(config: AlgorithmConfig) -> _Found:
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


def _check_advantages(
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
    if config.deviation_epsilon != DEVIATION_EPSILON and config.divisor != "group":
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


def _check_loss(config: AlgorithmConfig, named: Callable[[str], str]) -> _Found:
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


def _check_kl_penalty(config: AlgorithmConfig, named: Callable[[str], str]) -> _Found:
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


def _check_importance_sampling(config: AlgorithmConfig, named: Callable[[str], str]) -> _Found:
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
