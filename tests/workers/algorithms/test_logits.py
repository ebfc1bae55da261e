"""Claims about log-probabilities, entropies and divergences from logits."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from math import exp, log

import pytest

torch = pytest.importorskip("torch")

from tests.support.batches import near  # noqa: E402
from trinity_workers.algorithms.distillation import token_divergence  # noqa: E402
from trinity_workers.algorithms.logits import (  # noqa: E402
    VocabularyPart,
    head_statistics,
    token_statistics,
)


def logits_of(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log().requires_grad_()


def test_log_probabilities_and_entropies_are_those_of_the_distribution():
    # H(1/2, 1/4, 1/4) = 1/2 log 2 + 1/2 log 4 = 3/2 log 2.
    logits = logits_of([0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3])
    statistics = token_statistics(logits, torch.tensor([[0, 2]]), entropy=True)
    near(statistics.logprobs, [[log(0.5), log(1 / 3)]])
    near(statistics.entropy, [[1.5 * log(2), log(3)]])
    assert token_statistics(logits, torch.tensor([[0, 2]])).entropy is None


def test_the_temperature_is_that_of_sampling():
    # Odds of 4 to 1 become 2 to 1 at temperature 2.
    statistics = token_statistics(logits_of([0.8, 0.2]), torch.tensor([[0]]), temperature=2.0)
    near(statistics.logprobs, [[log(2 / 3)]])


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_chunks_change_neither_values_nor_gradients(chunk):
    lot = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 11, generator=lot, requires_grad=True)
    tokens = torch.randint(0, 11, (3, 5), generator=lot)
    statistics = token_statistics(logits, tokens, entropy=True, chunk=chunk)
    logs = logits.log_softmax(-1)
    chosen = logs.gather(-1, tokens[..., None])[..., 0]
    entropy = -(logs.exp() * logs).sum(-1)
    near(statistics.logprobs, chosen)
    near(statistics.entropy, entropy)
    weights = torch.randn(3, 5, generator=lot)
    gradients = torch.autograd.grad(
        ((statistics.logprobs - 0.3 * statistics.entropy) * weights).sum(), logits
    )
    other = torch.autograd.grad(((chosen - 0.3 * entropy) * weights).sum(), logits)
    near(gradients[0], other[0])


def test_logits_of_half_precision_are_summed_in_single():
    logits = torch.randn(1, 2, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    logprobs = token_statistics(logits, torch.tensor([[1, 2]])).logprobs
    assert logprobs.dtype == torch.float32
    near(logprobs, logits.float().log_softmax(-1)[0, [0, 1], [1, 2]][None])


def test_the_gradients_are_those_of_finite_differences():
    lot = torch.Generator().manual_seed(0)
    student = torch.randn(2, 2, 4, generator=lot, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(2, 2, 4, generator=lot, dtype=torch.float64)
    tokens = torch.tensor([[0, 1], [2, 3]])
    for function in (
        lambda x: token_statistics(x, tokens, entropy=True, chunk=3).entropy,
        lambda x: token_statistics(x, tokens, chunk=3).logprobs,
        *(
            lambda x, to=to: token_divergence(x, teacher, to, mixture=0.3, chunk=3)
            for to in ("forward", "reverse", "jensen-shannon")
        ),
    ):
        assert torch.autograd.gradcheck(function, (student,))


def head_of(dtype, bias=True):
    """Hidden states, a head and tokens of them."""
    lot = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, 8, generator=lot, dtype=dtype).requires_grad_()
    weight = torch.randn(11, 8, generator=lot, dtype=dtype).requires_grad_()
    bias = torch.randn(11, generator=lot, dtype=dtype).requires_grad_() if bias else None
    return hidden, weight, bias, torch.randint(0, 11, (3, 5), generator=lot)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("biased", [False, True])
def test_a_fused_head_has_values_and_gradients_of_its_logits(dtype, tolerance, chunk, biased):
    hidden, weight, bias, tokens = head_of(dtype, biased)
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    plain = token_statistics(
        torch.nn.functional.linear(hidden, weight, bias), tokens, temperature=0.7, entropy=True
    )
    fused = head_statistics(
        hidden, (weight, bias), tokens, temperature=0.7, entropy=True, chunk=chunk
    )
    near(fused.logprobs, plain.logprobs, tolerance)
    near(fused.entropy, plain.entropy, tolerance)
    weights = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    expected, gradients = (
        torch.autograd.grad(
            ((statistics.logprobs - 0.3 * statistics.entropy) * weights).sum(), inputs
        )
        for statistics in (plain, fused)
    )
    for gradient, other in zip(gradients, expected, strict=True):
        assert gradient.dtype == dtype
        scale = float(other.abs().max())
        near(gradient / scale, other / scale, tolerance)


def test_the_gradients_of_a_fused_head_are_those_of_finite_differences():
    hidden, weight, bias, tokens = head_of(torch.float64)

    def function(hidden, weight, bias):
        statistics = head_statistics(hidden, (weight, bias), tokens, entropy=True, chunk=4)
        return statistics.logprobs - 0.3 * statistics.entropy

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


class Ranks:
    """Threads that share a vocabulary, and the reductions over them."""

    def __init__(self, count: int) -> None:
        self.given = [None] * count
        self.all = threading.Barrier(count, timeout=60)

    def reduce(self, rank: int, function):
        def reduced(tensor):
            self.given[rank] = tensor
            self.all.wait()
            total = function(torch.stack(self.given))
            self.all.wait()
            return total

        return reduced


@pytest.mark.parametrize("fused", [False, True])
def test_ranks_that_share_a_vocabulary_have_the_results_of_one(fused):
    hidden, weight, _, tokens = head_of(torch.float64)
    whole = token_statistics(hidden @ weight.t(), tokens, entropy=True)
    weights = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))

    def loss(statistics):
        return ((statistics.logprobs - 0.3 * statistics.entropy) * weights).sum()

    expected = torch.autograd.grad(loss(whole), [hidden, weight])
    width, count = 4, 3  # the last column of 12 is padding
    padded = torch.cat([weight.detach(), torch.full((1, 8), 100.0, dtype=torch.float64)])
    ranks = Ranks(count)

    def compute(rank):
        mine = padded[rank * width : (rank + 1) * width].clone().requires_grad_()
        part = VocabularyPart(
            rank * width,
            min(width, 11 - rank * width),
            largest=ranks.reduce(rank, lambda given: given.amax(dim=0)),
            total=ranks.reduce(rank, lambda given: given.sum(dim=0)),
        )
        options = {"entropy": True, "chunk": 4, "part": part}
        if fused:
            statistics = head_statistics(hidden, (mine, None), tokens, **options)
        else:
            statistics = token_statistics(hidden @ mine.t(), tokens, **options)
        return statistics, torch.autograd.grad(loss(statistics), [hidden, mine])

    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(compute, range(count)))
    for statistics, _ in answers:
        near(statistics.logprobs, whole.logprobs)
        near(statistics.entropy, whole.entropy)
    near(sum(of_hidden for _, (of_hidden, _) in answers), expected[0])
    near(torch.cat([of_mine for _, (_, of_mine) in answers])[:11], expected[1])


@pytest.mark.parametrize(
    ("direction", "expected"),
    [
        # P = (1/2, 1/2), Q = (1/4, 3/4).
        ("forward", 0.5 * log(2) + 0.5 * log(2 / 3)),
        ("reverse", 0.25 * log(0.5) + 0.75 * log(1.5)),
        # M = (3/8, 5/8): 1/2 KL(P || M) + 1/2 KL(Q || M).
        (
            "jensen-shannon",
            0.5 * (0.5 * log(4 / 3) + 0.5 * log(4 / 5))
            + 0.5 * (0.25 * log(2 / 3) + 0.75 * log(6 / 5)),
        ),
    ],
)
def test_divergences_are_those_of_the_definition(direction, expected):
    student, teacher = logits_of([0.25, 0.75]), logits_of([0.5, 0.5])
    near(token_divergence(student, teacher, direction), [[expected]])
    near(token_divergence(teacher, teacher, direction), [[0.0]])


def test_a_teacher_gets_no_gradient_and_forbidden_tokens_add_nothing():
    forbidden = torch.tensor([[[0.0, 0.0, -torch.inf]]], requires_grad=True)
    other = torch.tensor([[[0.0, 1.0, -torch.inf]]], requires_grad=True)
    divergence = token_divergence(other, forbidden, "reverse").sum()
    assert divergence.isfinite()
    divergence.backward()
    assert forbidden.grad is None
    # Q = (1/(1+e), e/(1+e)), P = (1/2, 1/2): d/dx_1 = Q_0 Q_1 (log Q_1 - log Q_0) = Q_0 Q_1.
    q = 1 / (1 + exp(1))
    near(other.grad, [[[-q * (1 - q), q * (1 - q), 0.0]]])
    tokens = torch.tensor([[0]])
    entropy = token_statistics(other, tokens, entropy=True).entropy
    near(torch.autograd.grad(entropy.sum(), other)[0], [[[q * (1 - q), -q * (1 - q), 0.0]]])


def test_a_mixture_without_both_parts_is_refused():
    with pytest.raises(ValueError, match="between 0 and 1, not 1"):
        token_divergence(logits_of([1.0]), logits_of([1.0]), "jensen-shannon", mixture=1.0)
