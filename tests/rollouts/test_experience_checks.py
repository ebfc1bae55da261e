"""A check finds every fault of an experience that would spoil or end training."""

import math

import pytest
from msgspec.structs import replace

from tests.support.malformed_experiences import FAULTS, LIMITS, malformed
from trinity_events.rollouts.experience_checks import (
    LONGEST_DETAIL,
    MIN_LOGPROB,
    AnswerLimits,
    find_fault,
    find_group_fault,
    find_version_fault,
)
from trinity_schemas import Experience, ExperienceUnreadable, Sampling, StepRef, Turn
from trinity_schemas.codec import decode_experience
from trinity_schemas.rollouts import MAX_REWARD

SAMPLING = Sampling(max_new_tokens=4)
VERSION = StepRef(1, 0)


def sound(logprobs=(-0.5,), *, tokens=None, prompt=(3,), **values):
    tokens = [7] * len(logprobs) if tokens is None else tokens
    return Experience(
        run_id="r",
        epoch=1,
        ordinal=3,
        attempt=1,
        sample=0,
        samples=2,
        explorer="explorer-0",
        turns=[
            Turn(role="prompt", tokens=list(prompt)),
            Turn(
                role="policy",
                tokens=tokens,
                logprobs=list(logprobs),
                versions=[(VERSION, len(tokens))],
            ),
        ],
        reward=1.0,
        **values,
    )


def fault_of(experience):
    fault = find_fault(experience, LIMITS, SAMPLING)
    # In a group, between samples without a fault, the same one is found.
    in_group = find_group_fault([sound(), experience, sound()], LIMITS, SAMPLING)
    assert in_group == (None if fault is None else (experience, fault))
    return fault or find_version_fault(experience, epoch=1)


OF_CONTENT = {kind: fault for kind, (fault, _) in FAULTS.items() if fault != "request"}


@pytest.mark.parametrize("kind", OF_CONTENT)
def test_every_kind_of_malformed_experience_is_found(kind):
    payload = malformed(kind, sound())
    if OF_CONTENT[kind] == "unreadable":
        with pytest.raises(ExperienceUnreadable) as raised:
            decode_experience(payload)
        sender = raised.value.sender
        assert (sender.explorer, sender.ordinal, sender.attempt) == ("explorer-0", 3, 1)
        return
    fault = fault_of(decode_experience(payload))
    assert fault is not None
    assert fault.kind == OF_CONTENT[kind]
    assert len(fault.detail) <= LONGEST_DETAIL


@pytest.mark.parametrize(
    "experience",
    [
        sound(),
        sound([0.0, 1e-6, -100.0]),
        sound([-50.0] * 4),
        sound([-0.5] * 4, prompt=[97] * 124),
        sound(reward_parts={"score": -3e38, "x" * 256: 0.0}),
    ],
)
def test_what_a_sound_engine_may_send_has_no_fault(experience):
    assert fault_of(experience) is None


@pytest.mark.parametrize("reward", [MAX_REWARD, -MAX_REWARD])
def test_the_largest_reward_is_sound_and_the_next_one_is_not(reward):
    assert find_fault(replace(sound(), reward=reward)) is None
    assert find_fault(replace(sound(), reward=math.nextafter(reward, 2 * reward))).kind == "reward"


def test_log_probabilities_before_a_high_temperature_may_be_lower():
    cold, hot = SAMPLING, Sampling(max_new_tokens=4, temperature=2.0)
    low = sound([1.5 * MIN_LOGPROB])
    assert find_fault(low, LIMITS, cold).kind == "logprobs"
    assert find_fault(low, LIMITS, hot) is None


@pytest.mark.parametrize("token", [7, 70_000], ids=["two bytes", "four bytes"])
@pytest.mark.parametrize("length", [3, 100_000], ids=["short", "long"])
def test_a_bad_number_of_a_group_is_found_however_long_its_samples_are(token, length):
    sampling, limits = Sampling(max_new_tokens=length), AnswerLimits(vocabulary_size=2**17)
    short = sound([-0.5])
    samples = [sound([-0.5] * length, tokens=[token] * length)] * 2
    assert find_group_fault([short, *samples], limits, sampling) is None

    bad_id = sound([-0.5] * length, tokens=[token] * (length - 1) + [2**17])
    bad_logprob = sound([-0.5] * (length - 1) + [math.nan], tokens=[token] * length)
    for bad, kind in ((bad_id, "tokens"), (bad_logprob, "logprobs")):
        sample, fault = find_group_fault([short, *samples, bad], limits, sampling)
        assert sample is bad
        assert fault.kind == kind


def test_limits_that_are_unknown_are_not_checked():
    long = sound([-0.5] * 4000, tokens=[10**6] * 4000)
    assert find_fault(long) is None
    assert find_fault(long, AnswerLimits(vocabulary_size=10**6)).kind == "tokens"


def test_the_part_that_the_trainer_reads_must_be_there():
    limits = AnswerLimits(reward_part="score")
    assert find_fault(sound(), limits).kind == "reward-parts"
    assert find_fault(sound(reward_parts={"score": 1.0}), limits) is None


@pytest.mark.parametrize(
    ("arguments", "is_known"),
    [
        ({"published": {VERSION}}, True),
        ({"published": {StepRef(1, 1)}}, False),
        ({"exact": VERSION}, True),
        ({"exact": StepRef(1, 1)}, False),
        ({"exact": VERSION, "published": ()}, True),
        ({}, True),
    ],
)
def test_a_version_is_one_that_was_published_or_the_one_that_was_asked_for(arguments, is_known):
    assert (find_version_fault(sound(), epoch=1, **arguments) is None) is is_known
