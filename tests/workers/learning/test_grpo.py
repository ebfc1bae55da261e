"""GRPO: advantages, batches, log-probabilities and the loss."""

from __future__ import annotations

import dataclasses
import random
from itertools import islice
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from tests.support.experiences import FIRST, group  # noqa: E402
from trinity_schemas import Sampling  # noqa: E402
from trinity_workers.learning import grpo, policy  # noqa: E402
from trinity_workers.rollout_engines import GenerationRequest  # noqa: E402
from trinity_workers.rollout_engines.huggingface import HuggingFaceEngine  # noqa: E402
from trinity_workers.tasks import Question, SpellBackward  # noqa: E402

SAMPLES = 4
TOKENS = 7
"""Tokens of an answer at most: four letters, its end, and two for a wrong one."""


@pytest.fixture(scope="module")
def task() -> SpellBackward:
    return SpellBackward()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    policy.create_policy(folder, seed=0)
    return folder


def mixed_questions(task: SpellBackward, count: int) -> list[Question]:
    """Questions of both word lengths, so that a batch of them has padding."""
    questions = list(islice(task.training_questions(3), 100))
    short = [question for question in questions if len(question.answer) == 3]
    long = [question for question in questions if len(question.answer) == 4]
    return [short[i // 2] if i % 2 else long[i // 2] for i in range(count)]


def sampled(folder: Path, task: SpellBackward, *, temperature: float = 1.0):
    """The policy, and groups that it sampled. Their rewards are drawn by lot.

    A random policy earns none, which would mean no gradient.
    """
    model, tokenizer = policy.load_policy(folder)
    engine = HuggingFaceEngine(model, tokenizer, serves=FIRST)
    lot = random.Random(0)
    groups = []
    for ordinal, question in enumerate(mixed_questions(task, 8)):
        prompt = policy.encode_prompt(tokenizer, question.prompt)
        sampling = Sampling(max_new_tokens=TOKENS, temperature=temperature)
        requests = [
            GenerationRequest(tokens=prompt, sampling=sampling, ordinal=ordinal, sample=sample)
            for sample in range(SAMPLES)
        ]
        found = engine.generate_here(requests)
        rewards = [float(lot.random() < 0.5) for _ in found]
        groups.append(
            group(prompt, [one.tokens for one in found], [one.logprobs for one in found], rewards)
        )
    return model, tokenizer, groups


def test_response_logprobs_agree_with_those_that_the_rollout_recorded(
    folder: Path, task: SpellBackward
) -> None:
    for temperature in (1.0, 0.7):
        model, tokenizer, groups = sampled(folder, task, temperature=temperature)
        batch = grpo.collate(groups, tokenizer.pad_token_id)
        assert (batch.attention_mask[:, 0] == 0).any(), "the batch should have left padding"
        logprobs = grpo.response_logprobs(model, batch, temperature)
        assert logprobs.shape == batch.old_logprobs.shape == batch.response_mask.shape
        torch.testing.assert_close(logprobs, batch.old_logprobs, atol=1e-4, rtol=0.0)


def test_an_answer_does_not_depend_on_the_padding_that_its_batch_gives_it(
    folder: Path, task: SpellBackward
) -> None:
    model, tokenizer, groups = sampled(folder, task)
    together = grpo.response_logprobs(model, grpo.collate(groups, tokenizer.pad_token_id))
    for index, one in enumerate(groups):
        alone = grpo.response_logprobs(model, grpo.collate([one], tokenizer.pad_token_id))
        rows = together[index * SAMPLES : (index + 1) * SAMPLES, : alone.shape[1]]
        torch.testing.assert_close(rows, alone, atol=1e-4, rtol=0.0)


def test_collate_keeps_a_sampled_padding_token_as_a_real_one() -> None:
    pad = 0
    answers = [[pad, 7], [8]], [[-1.0, -2.0], [-3.0]], [1.0, 0.0]
    batch = grpo.collate([group([5, 6], *answers), group([5, 6, 9], *answers)], pad)
    assert batch.input_ids.tolist() == [
        [0, 5, 6, 0, 7],
        [0, 5, 6, 8, 0],
        [5, 6, 9, 0, 7],
        [5, 6, 9, 8, 0],
    ]
    assert batch.attention_mask[0].tolist() == [0, 1, 1, 1, 1]
    assert batch.attention_mask[1].tolist() == [0, 1, 1, 1, 0]
    assert batch.position_ids[0].tolist() == [0, 0, 1, 2, 3]
    assert batch.response_mask.tolist() == [[True, True], [True, False]] * 2
    assert batch.advantages.tolist() == [1.0, -1.0, 1.0, -1.0]
    assert batch.token_count == 6


def test_group_advantages_are_zero_when_all_rewards_are_equal() -> None:
    assert grpo.group_advantages([[0.1] * 7, [1.0] * 16, [0.0], []]) == [
        [0.0] * 7,
        [0.0] * 16,
        [0.0],
        [],
    ]


def test_group_advantages_have_mean_zero_and_deviation_one() -> None:
    advantages = torch.tensor(grpo.group_advantages([[1.0, 0.0, 0.0, 0.0], [0.3, 0.9, 0.2, 0.1]]))
    torch.testing.assert_close(advantages.mean(dim=1), torch.zeros(2))
    torch.testing.assert_close(advantages.std(dim=1, correction=0), torch.ones(2))
    with pytest.raises(ValueError, match="finite"):
        grpo.group_advantages([[1.0, float("nan")]])


def test_the_gradient_at_ratio_one_is_the_policy_gradient(
    folder: Path, task: SpellBackward
) -> None:
    model, tokenizer, groups = sampled(folder, task)
    batch = grpo.collate(groups, tokenizer.pad_token_id)

    logprobs = grpo.response_logprobs(model, batch)
    on_policy = dataclasses.replace(batch, old_logprobs=logprobs.detach())
    loss_sum, metrics = grpo.grpo_loss(logprobs, on_policy)
    actual = torch.autograd.grad(loss_sum, list(model.parameters()))

    logprobs = grpo.response_logprobs(model, batch)
    reinforce = -(logprobs * batch.advantages[:, None] * batch.response_mask).sum()
    expected = torch.autograd.grad(reinforce, list(model.parameters()))

    assert any(gradient.abs().max() > 1e-3 for gradient in expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert metrics["ratio"] == pytest.approx(1.0)
    assert metrics["clip_fraction"] == 0.0


def test_the_loss_sum_of_two_half_batches_is_that_of_the_whole(
    folder: Path, task: SpellBackward
) -> None:
    model, tokenizer, groups = sampled(folder, task)
    batch = grpo.collate(groups, tokenizer.pad_token_id)
    # Off policy, so that clipping has something to do.
    batch = dataclasses.replace(
        batch, old_logprobs=batch.old_logprobs + torch.linspace(-0.5, 0.5, TOKENS)
    )

    def loss_of(part: grpo.Batch) -> tuple[torch.Tensor, dict[str, float]]:
        return grpo.grpo_loss(grpo.response_logprobs(model, part), part)

    half = len(batch) // 2
    whole, whole_metrics = loss_of(batch)
    parts = [loss_of(batch.rows(0, half)), loss_of(batch.rows(half, len(batch)))]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole, atol=1e-4, rtol=1e-5)
    assert sum(metrics["tokens"] for _, metrics in parts) == whole_metrics["tokens"]
    assert 0.0 < whole_metrics["clip_fraction"] < 1.0


def test_clipping_stops_the_gradient_only_where_the_step_was_already_taken() -> None:
    batch = grpo.collate([group([5], [[6, 6], [6, 6]], [[0.0, 0.0]] * 2, [1.0, 0.0])], 0)
    logprobs = torch.tensor([[0.5, -0.5], [0.5, -0.5]], requires_grad=True)
    loss_sum, metrics = grpo.grpo_loss(logprobs, batch, clip=0.2)
    (gradient,) = torch.autograd.grad(loss_sum, logprobs)
    assert (gradient == 0.0).tolist() == [[True, False], [False, True]]
    assert metrics["clip_fraction"] == 0.5


def test_a_ratio_beyond_all_bounds_still_gives_a_finite_loss_and_gradient() -> None:
    batch = grpo.collate([group([5], [[6], [6]], [[-200.0]] * 2, [1.0, 0.0])], 0)
    logprobs = torch.zeros(2, 1, requires_grad=True)
    loss_sum, _ = grpo.grpo_loss(logprobs, batch)
    (gradient,) = torch.autograd.grad(loss_sum, logprobs)
    assert loss_sum.isfinite()
    assert gradient.isfinite().all()


def test_a_batch_of_no_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no responses"):
        grpo.collate([], 0)
