"""Noise that is a function of its place samples the policy, and nothing but it."""

import math

import pytest

torch = pytest.importorskip("torch")
RepetitionPenaltyLogitsProcessor = pytest.importorskip(
    "transformers"
).RepetitionPenaltyLogitsProcessor

from tests.support.tensors import identical  # noqa: E402
from trinity_schemas import Sampling  # noqa: E402
from trinity_workers.config.sections.rollouts import RolloutsConfig  # noqa: E402
from trinity_workers.config.train_config import TrainConfig  # noqa: E402
from trinity_workers.rollout_engines.base import SAMPLING_SETTINGS  # noqa: E402
from trinity_workers.rollout_engines.sampling import NoisySampler, turn_key  # noqa: E402
from trinity_workers.rollout_engines.vllm.options import get_sampling_arguments  # noqa: E402

ROWS = 40_000
LOGITS = torch.tensor([1.5, 0.0, -1.0, 0.7, -3.0, 0.2])
CPU = torch.device("cpu")
HIGHEST = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}
"""Chi-square by degrees of freedom that one sound sampler in a thousand exceeds."""


def sampled(sampling, keys, place=0, logits=LOGITS):
    sampler = NoisySampler(keys, [sampling] * len(keys), CPU)
    return sampler.choose(logits.expand(len(keys), -1), place)


def chi_square(tokens, probabilities):
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(tokens)
    assert (counts[expected == 0] == 0).all(), "a token that has no probability was sampled"
    cells = expected > 0
    return float(((counts - expected)[cells] ** 2 / expected[cells]).sum()), int(cells.sum()) - 1


def assert_samples(tokens, probabilities):
    statistic, freedom = chi_square(tokens, probabilities)
    assert statistic < HIGHEST[freedom]


def keys_over(what):
    return [
        turn_key(**{"seed": 0, "ordinal": 0, "sample": 0, "turn": 0, what: at})
        for at in range(ROWS)
    ]


@pytest.mark.parametrize("what", ["seed", "ordinal", "sample", "turn"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_are_drawn_from_the_softmax_at_the_temperature(what, temperature):
    tokens, logprobs = sampled(Sampling(max_new_tokens=1, temperature=temperature), keys_over(what))
    expected = (LOGITS / temperature).log_softmax(-1)
    assert_samples(tokens, expected.exp())
    torch.testing.assert_close(logprobs, expected[tokens])


def test_tokens_of_successive_places_are_drawn_from_the_softmax_and_are_independent():
    sampler = NoisySampler(keys_over("sample")[:200], [Sampling(max_new_tokens=1)] * 200, CPU)
    logits = LOGITS.expand(200, -1)
    tokens = torch.stack([sampler.choose(logits, place)[0] for place in range(201)])
    assert_samples(tokens.flatten(), LOGITS.softmax(-1))
    probabilities = LOGITS.softmax(-1)
    pairs = (tokens[:-1] * len(LOGITS) + tokens[1:]).flatten()
    statistic, freedom = chi_square(pairs, torch.outer(probabilities, probabilities).flatten())
    assert freedom == 35 and statistic < 66.6  # one in a thousand


def test_entries_of_a_large_vocabulary_are_drawn_alike():
    keys = keys_over("ordinal")[:20_000]
    sampler = NoisySampler(keys, [Sampling(max_new_tokens=1)] * len(keys), CPU)
    tokens, logprobs = sampler.choose(torch.zeros(1, 1000).expand(len(keys), -1), 3)
    statistic, _ = chi_square(tokens, torch.full((1000,), 0.001))
    assert abs(statistic - 999) < 4 * math.sqrt(2 * 999)
    torch.testing.assert_close(logprobs, torch.full_like(logprobs, -math.log(1000)))


# Probabilities of LOGITS by token: 0.491, 0.109, 0.040, 0.220, 0.005, 0.134.
TRUNCATED = [
    ({"top_k": 2}, [0, 3]),
    ({"top_p": 0.7}, [0, 3]),
    ({"top_p": 0.4}, [0]),
    ({"min_p": 0.25}, [0, 3, 5]),
    ({"min_p": 1.0}, [0]),
    ({"top_p": 0.84}, [0, 3, 5]),
    ({"top_k": 3, "top_p": 0.84}, [0, 3]),  # they have 0.711 of all, and 0.842 of three
    ({"min_p": 0.25, "top_p": 0.84}, [0, 3]),
    ({"top_k": 3, "top_p": 0.84, "temperature": 2.0}, [0, 3, 5]),
]


@pytest.mark.parametrize(("settings", "candidates"), TRUNCATED)
def test_truncated_tokens_are_drawn_from_what_is_left_and_have_its_log_probabilities(
    settings, candidates
):
    """Invariants 1 and 2."""
    sampling = Sampling(max_new_tokens=1, **settings)
    tokens, logprobs = sampled(sampling, keys_over("sample"))
    expected = torch.zeros_like(LOGITS)
    expected[candidates] = (LOGITS / sampling.temperature).softmax(-1)[candidates]
    expected /= expected.sum()
    if len(candidates) > 1:
        assert_samples(tokens, expected)
    else:
        assert (tokens == candidates[0]).all()
    torch.testing.assert_close(logprobs, expected.log()[tokens])
    # The weight of importance sampling, which the losses take, is the kept mass: none of it is
    # lost, on the mean of the sampled tokens.
    whole = (LOGITS / sampling.temperature).log_softmax(-1)
    weights = (whole[tokens] - logprobs).exp()
    torch.testing.assert_close(weights, weights[:1].expand_as(weights))
    torch.testing.assert_close(weights[0], whole.exp()[candidates].sum())


def test_a_repetition_penalty_is_of_all_earlier_tokens_and_in_the_log_probabilities():
    keys = keys_over("sample")
    sampling = Sampling(max_new_tokens=2, repetition_penalty=2.0)
    sampler = NoisySampler(keys, [sampling] * len(keys), CPU, [[3, 2]] * len(keys))
    penalised = LOGITS.clone()
    penalised[3], penalised[2] = LOGITS[3] / 2, LOGITS[2] * 2
    first, logprobs = sampler.choose(LOGITS.expand(len(keys), -1), 0)
    assert_samples(first, penalised.softmax(-1))
    torch.testing.assert_close(logprobs, penalised.log_softmax(-1)[first])
    second, logprobs = sampler.choose(LOGITS.expand(len(keys), -1), 1)
    after = penalised.clone()
    after[0] /= 2
    began = first == 0
    assert_samples(second[began], after.softmax(-1))
    torch.testing.assert_close(logprobs[began], after.log_softmax(-1)[second[began]])
    # That of another library, on the same scores.
    processed = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([[3, 2]]), LOGITS[None])
    torch.testing.assert_close(processed[0], penalised)


def test_settings_of_one_row_do_not_touch_another():
    """Invariant 3."""
    keys = keys_over("sample")[:3]
    plain, greedy = Sampling(max_new_tokens=1), Sampling(max_new_tokens=1, temperature=0.0)
    narrow = Sampling(max_new_tokens=1, top_k=1, top_p=0.5, min_p=0.1, temperature=0.3)
    mixed = NoisySampler(keys, [plain, greedy, narrow], CPU)
    for place in range(50):
        tokens, logprobs = mixed.choose(LOGITS.expand(3, -1), place)
        for row, (key, sampling) in enumerate(zip(keys, (plain, greedy, narrow), strict=True)):
            alone, alone_logprobs = sampled(sampling, [key], place)
            assert tokens[row] == alone[0]
            assert identical(logprobs[row], alone_logprobs[0])
        assert tokens[1] == tokens[2] == 0


CHANGED = {
    **{"max_new_tokens": 9, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
    **{"repetition_penalty": 1.5, "stop": ("a",)},
}
"""Settings of sampling, each with another value than its default; the seed is the run's."""


def test_every_setting_of_sampling_reaches_the_requests():
    assert set(CHANGED) == set(Sampling.__struct_fields__) - {"seed"}, "enter it in CHANGED"
    sampling = TrainConfig(rollouts=RolloutsConfig(**CHANGED)).sampling
    passed = {name: getattr(sampling, name) for name in CHANGED}
    assert passed == CHANGED, "pass it on in TrainConfig.sampling"


def test_a_setting_of_sampling_is_honoured_by_every_engine_or_may_be_lacked():
    assert set(SAMPLING_SETTINGS) == set(CHANGED) - {"max_new_tokens", "temperature"}, (
        "an engine that lacks it would ignore it: enter it in SAMPLING_SETTINGS of base.py"
    )


# Stop strings are found here, token by token, and the limit of tokens is an argument.
@pytest.mark.parametrize("name", sorted(set(CHANGED) - {"max_new_tokens", "stop"}))
def test_every_setting_of_sampling_reaches_vllm(name):
    plain = Sampling(max_new_tokens=4)
    changed = Sampling(**{"max_new_tokens": 4, name: CHANGED[name]})
    assert get_sampling_arguments(plain, 4, 0, ()) != get_sampling_arguments(changed, 4, 0, ()), (
        "pass it on in get_sampling_arguments of vllm/options.py"
    )


def test_keys_differ_wherever_seed_ordinal_sample_and_turn_do():
    places = [
        (a, b, c, d) for a in range(4) for b in range(12) for c in range(12) for d in range(4)
    ]
    assert len({turn_key(*place) for place in places}) == len(places)
    # A recorded value: other keys would give other answers after an update.
    assert turn_key(1, 2, 3, 4) == -3557693780154429694
