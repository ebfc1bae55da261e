"""Checks of experiences, which an explorer may send with any content. No I/O.

1. An experience without a fault can be trained on: no number of it is, or becomes by a square and a
   sum, a float32 that is not finite, and no token lies outside of the vocabulary.
2. A check reads an experience and changes nothing.
3. No content of an experience raises.
4. A fault says in one sentence what is wrong, with at most :data:`LONGEST_DETAIL` characters.
5. No token becomes a Python object where NumPy is installed, as it is wherever one trains.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from trinity_schemas import (
    Experience,
    ExperienceHeader,
    ExperienceReference,
    Sampling,
    StepRef,
    Turn,
)
from trinity_schemas.arrays import TypedArray
from trinity_schemas.identity import LONGEST_NAME
from trinity_schemas.rollouts import MAX_FLOAT32, MAX_REWARD, MAX_REWARD_PARTS, REWARD_RANGE

LOGPROB_TOLERANCE = 0.01
"""Excess over 0 that rounding may give a log-probability. Logits of 10,000 less their logarithmic
sum in float32 are wrong by up to 0.001."""
MIN_LOGPROB = -104.0
"""Least log-probability at temperature 1. The smallest positive float32 has the logarithm -103.3,
so a softmax in float32 samples no token below it."""
LONGEST_DETAIL = 500
"""Maximum characters of a fault in words, as it goes into logs and events."""

_JOINED_BYTES = 1 << 18
"""Bytes of a group's arrays up to which joining them costs less than a call of NumPy for each."""

FaultKind = Literal[
    "unreadable", "request", "reward", "reward-parts", "logprobs", "tokens", "length", "versions"
]
"""Property of an experience that is at fault.

`unreadable`: no experience of the contract. `request`: samples or an attempt that were not asked
for. The others name the field.
"""


class Fault(NamedTuple):
    """Reason for which an experience is malformed."""

    kind: FaultKind
    detail: str
    """Sentence about the experience, without its subject's name and without a full stop."""


class AnswerLimits(Struct, frozen=True, kw_only=True):
    """Limits of answers that follow from a run's model and task; None for a limit that is unknown.

    The number of samples and the tokens of a turn are those of the request.
    """

    vocabulary_size: int | None = None
    """Token ids of the model, from 0."""
    max_positions: int | None = None
    """Tokens of an episode, its prompt included."""
    max_turns: int | None = None
    """Turns of the policy in an episode."""
    reward_part: str | None = None
    """Part of the reward that the trainer reads."""
    error_score: float | None = None
    """Reward of samples whose reward failed; None takes no such sample."""
    question_sets: frozenset[str] | None = None
    """Names of the sets of questions; a question of none has an empty one."""


NO_LIMITS = AnswerLimits()


def find_fault(
    experience: Experience, limits: AnswerLimits = NO_LIMITS, sampling: Sampling | None = None
) -> Fault | None:
    """Return the first fault of an experience that is known from its content alone.

    Args:
        experience: One sample of a group.
        limits: Limits of the run's model and task.
        sampling: Sampling that was asked for; None for an answer to an unknown request.
    """
    return _find_sample_fault(experience, limits, sampling, are_numbers_sound=False)


def find_group_fault(
    group: Sequence[Experience],
    limits: AnswerLimits = NO_LIMITS,
    sampling: Sampling | None = None,
) -> tuple[Experience, Fault] | None:
    """Return the first sample of a group that has a fault, and that fault.

    Faults are those of :func:`find_fault`; the ids and log-probabilities of all samples are looked
    at together, which takes a third of the time where samples are short.

    Args:
        group: Samples of one prompt.
        limits: Limits of the run's model and task.
        sampling: Sampling that was asked for; None if it is unknown.
    """
    # A turn that several samples share, such as their prompt, once.
    turns = [*{id(turn): turn for sample in group for turn in sample.turns}.values()]
    are_sound = _are_numbers_sound(turns, limits, sampling)
    for sample in group:
        fault = _find_sample_fault(sample, limits, sampling, are_numbers_sound=are_sound)
        if fault is not None:
            return sample, fault
    return None


def find_reference_fault(
    reference: ExperienceReference,
    limits: AnswerLimits = NO_LIMITS,
    sampling: Sampling | None = None,
) -> Fault | None:
    """Return the first fault of a reference that is known without its payload.

    Ids, log-probabilities and turns are checked by :func:`find_fault`, where the payload is loaded.

    Args:
        reference: Reference to one sample of a group.
        limits: Limits of the run's model and task.
        sampling: Sampling that was asked for; None for an answer to an unknown request.
    """
    return (
        _find_set_fault(reference, limits)
        or _find_reward_fault(reference, limits)
        or _find_reference_length_fault(reference, limits, sampling)
    )


def find_score_fault(experience: ExperienceHeader, limits: AnswerLimits) -> Fault | None:
    """Return the fault of a sample with a score in the place of its reward.

    Ranks do not check it: the dispatcher takes no such sample unless it is asked to.
    """
    if not experience.reward_error:
        return None
    if limits.error_score is None:
        return Fault("reward", f"its reward failed ({experience.reward_error})")
    if experience.reward != limits.error_score:
        return Fault(
            "reward",
            f"its reward failed and is {experience.reward:g}, not the score {limits.error_score:g}",
        )
    return None


def find_version_fault(
    experience: ExperienceHeader,
    *,
    epoch: int,
    exact: StepRef | None = None,
    published: Collection[StepRef] | None = None,
) -> Fault | None:
    """Return a fault of the weight versions that an experience names.

    Args:
        experience: One sample of a group, without another fault.
        epoch: Epoch of the run.
        exact: The one version that may serve the request, if there is only one.
        published: Versions that the trainer has published; None if it did not list them.
    """
    # Checked because staleness is computed from what the explorer says here.
    for version in experience.version_tokens:
        named = f"a token is of the version of epoch {version.epoch}, step {version.step}"
        if version.epoch > epoch:
            return Fault("versions", f"{named}, and the run is at epoch {epoch}")
        if exact is not None and version != exact:
            needed = f"epoch {exact.epoch}, step {exact.step}"
            return Fault("versions", f"{named}, and its request names {needed} alone")
        if exact is None and published is not None and version not in published:
            return Fault("versions", f"{named}, which the trainer has not published")
    return None


def _find_sample_fault(
    experience: Experience,
    limits: AnswerLimits,
    sampling: Sampling | None,
    *,
    are_numbers_sound: bool,
) -> Fault | None:
    """Return the first fault of a sample, whose ids and log-probabilities may be checked before."""
    return (
        _find_set_fault(experience, limits)
        or _find_reward_fault(experience, limits)
        or _find_length_fault(experience, limits, sampling)
        or (
            next(filter(None, map(_find_count_fault, experience.turns)), None)
            if are_numbers_sound
            else _find_turn_fault(experience, limits, sampling)
        )
    )


def _find_set_fault(experience: ExperienceHeader, limits: AnswerLimits) -> Fault | None:
    # The name is in those of metrics, of which an explorer may not add any.
    if limits.question_sets is None or experience.question_set in limits.question_sets:
        return None
    return Fault("request", f"the run has no set of questions {experience.question_set!r}")


def _find_reward_fault(experience: ExperienceHeader, limits: AnswerLimits) -> Fault | None:
    reward, parts = experience.reward, experience.reward_parts
    # A comparison with NaN is false, so that it fails here too.
    if not -MAX_REWARD <= reward <= MAX_REWARD:
        return Fault("reward", f"its reward is {reward:g}, and rewards are {REWARD_RANGE}")
    if len(parts) > MAX_REWARD_PARTS:
        return Fault("reward-parts", f"its reward has {len(parts)} parts, above {MAX_REWARD_PARTS}")
    for name, value in parts.items():
        if len(name) > LONGEST_NAME:
            return Fault("reward-parts", f"a part of its reward has a name of {len(name)} letters")
        if not -MAX_FLOAT32 <= value <= MAX_FLOAT32:
            return Fault(
                "reward-parts",
                f"the part {name!r} of its reward is {value:g}, and is to be finite in float32",
            )
    if limits.reward_part is not None and limits.reward_part not in parts:
        return Fault("reward-parts", f"its reward has no part {limits.reward_part!r}")
    return None


def _find_reference_length_fault(
    reference: ExperienceReference, limits: AnswerLimits, sampling: Sampling | None
) -> Fault | None:
    sampled = sum(reference.version_tokens.values())
    if sampling is not None and limits.max_turns is not None:
        most = sampling.max_new_tokens * limits.max_turns
        if sampled > most:
            return Fault(
                "length",
                f"it has {sampled} tokens of the policy, and {most} were asked for at most",
            )
    if limits.max_positions is not None and reference.tokens > limits.max_positions:
        return Fault(
            "length",
            f"it has {reference.tokens} tokens, and the model has {limits.max_positions} positions",
        )
    return None


def _find_length_fault(
    experience: Experience, limits: AnswerLimits, sampling: Sampling | None
) -> Fault | None:
    turns = experience.turns
    sampled = [len(turn.tokens) for turn in turns if turn.role == "policy"]
    total = sum(len(turn.tokens) for turn in turns)
    if not sum(sampled):
        return Fault("length", "it has no token of the policy")
    if sampling is not None and max(sampled) > sampling.max_new_tokens:
        return Fault(
            "length",
            f"a turn has {max(sampled)} tokens of the policy, and {sampling.max_new_tokens} were "
            "asked for at most",
        )
    if limits.max_turns is not None and len(sampled) > limits.max_turns:
        return Fault(
            "length",
            f"it has {len(sampled)} turns of the policy, and {limits.max_turns} were asked for at "
            "most",
        )
    if limits.max_positions is not None and total > limits.max_positions:
        return Fault(
            "length", f"it has {total} tokens, and the model has {limits.max_positions} positions"
        )
    return None


def _are_numbers_sound(
    turns: Sequence[Turn], limits: AnswerLimits, sampling: Sampling | None
) -> bool:
    """Return False if an id or a log-probability of some turns is at fault."""
    size, least = limits.vocabulary_size, _get_least_logprob(sampling)
    ids = _join([turn.tokens for turn in turns])
    logprobs = _join([turn.logprobs for turn in turns])
    return not any(_find_token_fault(buffer, "group", size) for buffer in ids) and not any(
        _find_logprob_fault(buffer, least) for buffer in logprobs
    )


def _join(arrays: Sequence[TypedArray | list[Any]]) -> list[memoryview]:
    """Return the numbers of arrays as few buffers: those of one type as one, unless they are long.

    Empty arrays have none.
    """
    by_type = defaultdict[str, list[TypedArray]](list)
    for array in arrays:
        assert isinstance(array, TypedArray)  # a turn packs the lists that it is given
        if array.length:
            by_type[array.dtype].append(array)
    buffers = []
    for same_type in by_type.values():
        if sum(len(array.data) for array in same_type) > _JOINED_BYTES:
            buffers += [array.view for array in same_type]
        else:
            length = sum(array.length for array in same_type)
            data = b"".join(array.data for array in same_type)
            buffers.append(replace(same_type[0], length=length, data=data).view)
    return buffers


def _get_least_logprob(sampling: Sampling | None) -> float:
    """Return the least log-probability of a token that an engine may have sampled."""
    # At temperature 1 a token has up to T times the log-probability that it has at temperature T.
    hottest = max(1.0, sampling.temperature) if sampling is not None else 1.0
    return MIN_LOGPROB * hottest  # of an engine that reports logits before the temperature


def _find_turn_fault(
    experience: Experience, limits: AnswerLimits, sampling: Sampling | None
) -> Fault | None:
    least = _get_least_logprob(sampling)
    for turn in experience.turns:
        fault = None
        if turn.tokens:
            fault = _find_token_fault(turn.token_view, turn.role, limits.vocabulary_size)
        fault = fault or _find_count_fault(turn)
        if fault is None and turn.logprobs:
            fault = _find_logprob_fault(turn.logprob_view, least)
        if fault is not None:
            return fault
    return None


def _find_token_fault(ids: memoryview, role: str, vocabulary_size: int | None) -> Fault | None:
    # Two extremes check all ids without a Python object for each (invariant 5).
    lowest, highest = _find_extremes(ids)
    if lowest < 0:
        return Fault("tokens", f"the {role} has the token id {lowest:.0f}, below 0")
    if vocabulary_size is None or highest < vocabulary_size:
        return None
    return Fault(
        "tokens",
        f"the {role} has the token id {highest:.0f}, and the model's end at {vocabulary_size - 1}",
    )


def _find_logprob_fault(logprobs: memoryview, least: float) -> Fault | None:
    lowest, highest = _find_extremes(logprobs)
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        return Fault("logprobs", "a log-probability is not finite")
    if highest > LOGPROB_TOLERANCE:
        return Fault("logprobs", f"a log-probability is {highest:g}, above 0")
    if lowest < least:
        return Fault(
            "logprobs", f"a log-probability is {lowest:g}, and a float32 softmax ends at {least:g}"
        )
    return None


def _find_extremes(values: memoryview) -> tuple[float, float]:
    """Return the least and the largest of some values; NaN twice if one is NaN."""
    try:
        import numpy as np
    except ImportError:  # a loop on the base install
        # min and max ignore NaN in most places; a sum with a NaN is one.
        total = float(sum(values))
        return (total, total) if math.isnan(total) else (min(values), max(values))
    array = np.asarray(values)
    return float(array.min()), float(array.max())


def _find_count_fault(turn: Turn) -> Fault | None:
    # The counts add up to the tokens of the policy (the contract). With one below 1 others exceed
    # them, or a turn without such tokens names a version, by which staleness would be measured.
    if turn.versions and min(count for _, count in turn.versions) < 1:
        return Fault("versions", "a version has fewer than one token")
    return None
