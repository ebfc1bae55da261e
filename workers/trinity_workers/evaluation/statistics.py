"""Results of an evaluation: mean reward and pass@k, each with an interval."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, fsum, sqrt
from statistics import NormalDist
from typing import NamedTuple

from .settings import EvaluationSet

CONFIDENCE = 0.95
# 1.96 for 95 %, two-sided.
_QUANTILE = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


class Estimate(NamedTuple):
    """Mean over questions, and the ends of its interval."""

    mean: float
    low: float
    high: float


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k of one question.

    It is the probability that one of ``k`` answers is right that are drawn without replacement from
    ``samples`` answers, of which ``right`` are: 1 - C(n - c, k) / C(n, k), equation 1 of Chen et
    al., "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374, 2021).
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"there is no pass@{k} of {right} right answers among {samples}")
    return 1.0 - comb(samples - right, k) / comb(samples, k)


def estimate(of_questions: Sequence[float]) -> Estimate:
    """Return the mean over questions, with its interval of 95 % by the normal approximation.

    Questions are the independent units: answers to one question hang together. So the standard
    error is that of the questions' own means, clustered by question (Miller, "Adding Error Bars to
    Evals", arXiv 2411.00640, 2024). One question alone has no interval: both ends are its value.
    """
    count = len(of_questions)
    # Summed exactly, so that the order of the answers changes no bit of a result.
    mean = fsum(of_questions) / count
    if count == 1:
        return Estimate(mean, mean, mean)
    # count - 1: an unbiased estimate from a sample of questions.
    variance = fsum((question_mean - mean) ** 2 for question_mean in of_questions) / (count - 1)
    half = _QUANTILE * sqrt(variance / count)
    return Estimate(mean, mean - half, mean + half)


def estimate_share(of_questions: Sequence[float], answers: int) -> Estimate:
    """Return the mean of shares over questions, with its interval of 95 %, within 0 and 1.

    It is the score interval of Wilson ("Probable Inference", 1927) with the effective number of
    answers that the questions' variance gives, as in Dean and Pagano, "Evaluating Confidence
    Interval Methods for Binomial Proportions in Clustered Surveys" (2015). Where all shares are 0
    or all are 1, the variance says nothing, and each question counts as one answer.

    Args:
        of_questions: Share of each question, from 0 to 1.
        answers: Number of all answers, which the effective number does not exceed.
    """
    count = len(of_questions)
    mean = fsum(of_questions) / count
    effective = float(count)
    if count > 1 and 0 < mean < 1:
        # Of one answer a question it is mean * (1 - mean), so that each counts as one.
        variance = fsum((share - mean) ** 2 for share in of_questions) / count
        most = count * mean * (1 - mean) / variance if variance else float(answers)
        effective = min(most, float(answers))
    square = _QUANTILE**2
    center = (mean + square / (2 * effective)) / (1 + square / effective)
    half = _QUANTILE * sqrt(mean * (1 - mean) / effective + square / (4 * effective**2))
    half /= 1 + square / effective
    # Rounding may leave the mean outside by the last bit, where all shares are equal.
    return Estimate(mean, max(min(center - half, mean), 0.0), min(max(center + half, mean), 1.0))


def results(settings: EvaluationSet, rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the metrics of a set from the rewards of each question's answers.

    The mean of rewards that are all from 0 to 1 has the interval of a share.
    """
    answers = sum(map(len, rewards))
    means = [fsum(of_one) / len(of_one) for of_one in rewards]
    is_share = all(0 <= reward <= 1 for of_one in rewards for reward in of_one)
    metrics = _format_metric(
        "mean", estimate_share(means, answers) if is_share else estimate(means)
    )
    for k in settings.passes:
        passed = [
            pass_at_k(len(of_one), sum(reward >= settings.correct_from for reward in of_one), k)
            for of_one in rewards
        ]
        metrics |= _format_metric(f"pass_at_{k}", estimate_share(passed, answers))
    return metrics


def _format_metric(name: str, interval: Estimate) -> dict[str, float]:
    return {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
