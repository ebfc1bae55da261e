"""Claims about log-probabilities, entropies and divergences from logits."""

from __future__ import annotations

from math import exp, log

import pytest

torch = pytest.importorskip("torch")

from tests.support.batches import near  # noqa: E402
from trinity_workers.algorithms.distillation import token_divergence  # noqa: E402
from trinity_workers.algorithms.logits import token_statistics  # noqa: E402


def logits_of(*probabilities):
    return torch.tensor([probabilities], dtype=torch.float64).log().requires_grad_()


def test_log_probabilities_and_entropies_are_those_of_the_distribution():
    # H(1/2, 1/4, 1/4) = 1/2 log 2 + 1/2 log 4 = 3/2 log 2.
    logits = logits_of([0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3])
    found = token_statistics(logits, torch.tensor([[0, 2]]), entropy=True)
    near(found.logprobs, [[log(0.5), log(1 / 3)]])
    near(found.entropy, [[1.5 * log(2), log(3)]])
    assert token_statistics(logits, torch.tensor([[0, 2]])).entropy is None


def test_the_temperature_is_that_of_sampling():
    # Odds of 4 to 1 become 2 to 1 at temperature 2.
    found = token_statistics(logits_of([0.8, 0.2]), torch.tensor([[0]]), temperature=2.0)
    near(found.logprobs, [[log(2 / 3)]])


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_chunks_change_neither_values_nor_gradients(chunk):
    lot = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 11, generator=lot, requires_grad=True)
    tokens = torch.randint(0, 11, (3, 5), generator=lot)
    found = token_statistics(logits, tokens, entropy=True, chunk=chunk)
    logs = logits.log_softmax(-1)
    chosen = logs.gather(-1, tokens[..., None])[..., 0]
    entropy = -(logs.exp() * logs).sum(-1)
    near(found.logprobs, chosen)
    near(found.entropy, entropy)
    weights = torch.randn(3, 5, generator=lot)
    one = torch.autograd.grad(((found.logprobs - 0.3 * found.entropy) * weights).sum(), logits)
    other = torch.autograd.grad(((chosen - 0.3 * entropy) * weights).sum(), logits)
    near(one[0], other[0])


def test_logits_of_half_precision_are_summed_in_single():
    logits = torch.randn(1, 2, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = token_statistics(logits, torch.tensor([[1, 2]])).logprobs
    assert found.dtype == torch.float32
    near(found, logits.float().log_softmax(-1)[0, [0, 1], [1, 2]][None])


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
    found = token_divergence(other, forbidden, "reverse").sum()
    assert found.isfinite()
    found.backward()
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
