"""Results of an evaluation: pass@k by its definition, and intervals that hold what they promise."""

import random
from itertools import combinations
from statistics import fmean

import pytest

from trinity_workers.evaluation.settings import EvaluationSet
from trinity_workers.evaluation.statistics import (
    CONFIDENCE,
    estimate,
    estimate_share,
    pass_at_k,
    results,
)


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_all_choices_of_k_answers_with_a_right_one(samples):
    for right in range(samples + 1):
        answers = [place < right for place in range(samples)]
        for k in range(1, samples + 1):
            share = fmean(any(chosen) for chosen in combinations(answers, k))
            assert pass_at_k(samples, right, k) == pytest.approx(share)


def test_pass_at_k_is_unbiased_where_the_share_of_right_answers_is_not():
    drawn, chance, k = random.Random(0), 0.3, 4
    counts = [sum(drawn.random() < chance for _ in range(8)) for _ in range(20_000)]
    true = 1 - (1 - chance) ** k
    assert fmean(pass_at_k(8, right, k) for right in counts) == pytest.approx(true, abs=0.005)
    plugged_in = fmean(1 - (1 - right / 8) ** k for right in counts)
    assert abs(plugged_in - true) > 0.02


def test_pass_at_k_of_more_answers_than_there_are_is_refused():
    with pytest.raises(ValueError, match="pass@5"):
        pass_at_k(4, 1, 5)


@pytest.mark.parametrize("interval_of", [estimate, lambda means: estimate_share(means, 240)])
def test_the_interval_holds_the_mean_as_often_as_it_says(interval_of):
    drawn, within, trials = random.Random(1), 0, 2_000
    for _ in range(trials):
        of_questions = []
        for _ in range(60):
            chance = drawn.random()  # questions differ, and their answers hang together
            of_questions.append(fmean(drawn.random() < chance for _ in range(4)))
        interval = interval_of(of_questions)
        within += interval.low <= 0.5 <= interval.high
    assert within / trials == pytest.approx(CONFIDENCE, abs=0.02)


def test_one_question_has_no_interval():
    assert estimate([0.25]) == (0.25, 0.25, 0.25)


def test_the_results_of_a_set_are_mean_and_passes_with_their_ends():
    settings = EvaluationSet(samples=4, correct_from=0.5)
    metrics = results(settings, [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.4], [0.0] * 4])
    assert metrics["mean"] == pytest.approx((0.25 + 0.475 + 0) / 3)
    assert metrics["pass_at_1"] == pytest.approx((0.25 + 0.75) / 3)
    assert metrics["pass_at_4"] == pytest.approx(2 / 3)
    for name in ("mean", "pass_at_1", "pass_at_4"):
        assert metrics[f"{name}_low"] < metrics[name] <= metrics[f"{name}_high"]
    ends = [metrics[f"pass_at_4_{end}"] for end in ("low", "high")]
    assert min(ends) > 0 and max(ends) < 1, "the interval of a share is within 0 and 1"
    assert len(metrics) == 9


def test_32_right_answers_leave_a_doubt_and_no_share_is_above_1():
    assert estimate_share([1.0] * 32, 32) == (1.0, pytest.approx(0.8928, abs=1e-4), 1.0)
    assert estimate_share([0.0] * 32, 32) == (0.0, 0.0, pytest.approx(0.1072, abs=1e-4))
    nearly = estimate_share([1.0] * 30 + [0.0] * 2, 32)
    assert (nearly.low, nearly.high) == (
        pytest.approx(0.7985, abs=1e-4),
        pytest.approx(0.9827, abs=1e-4),
    )


@pytest.mark.parametrize("questions", [1, 2, 5])
def test_an_interval_of_shares_has_its_mean_within_its_ends(questions):
    for shares in ([0.3] * questions, [0.0, 1.0, 0.5, 0.2, 0.9][:questions]):
        mean, low, high = estimate_share(shares, 4 * questions)
        assert 0 <= low <= mean <= high <= 1


def test_rewards_beyond_1_have_an_interval_that_may_be_too():
    metrics = results(EvaluationSet(samples=1), [[1.0], [3.0], [2.0]])
    assert metrics["mean_low"] < 1 < metrics["mean"] < 3 < metrics["mean_high"]
