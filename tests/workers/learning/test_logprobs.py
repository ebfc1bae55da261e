"""Log-probabilities of responses, as the trainer computes them."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from tests.support.experiences import FIRST, group  # noqa: E402
from trinity_schemas import Sampling  # noqa: E402
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.learning import policy  # noqa: E402
from trinity_workers.learning.logprobs import response_logprobs, response_statistics  # noqa: E402
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
            group(
                prompt,
                [one.tokens for one in found],
                [one.logprobs for one in found],
                rewards,
                ordinal=ordinal,
            )
        )
    return model, tokenizer, groups


def test_response_logprobs_agree_with_those_that_the_rollout_recorded(
    folder: Path, task: SpellBackward
) -> None:
    for temperature in (1.0, 0.7):
        model, tokenizer, groups = sampled(folder, task, temperature=temperature)
        batch = collate(groups, tokenizer.pad_token_id)
        assert (batch.attention_mask[:, 0] == 0).any(), "the batch should have left padding"
        logprobs = response_logprobs(model, batch, temperature)
        assert logprobs.shape == batch.behaviour_logprobs.shape == batch.response_mask.shape
        torch.testing.assert_close(logprobs, batch.behaviour_logprobs, atol=1e-4, rtol=0.0)


def test_an_answer_does_not_depend_on_the_padding_that_its_batch_gives_it(
    folder: Path, task: SpellBackward
) -> None:
    model, tokenizer, groups = sampled(folder, task)
    together = response_logprobs(model, collate(groups, tokenizer.pad_token_id))
    for index, one in enumerate(groups):
        alone = response_logprobs(model, collate([one], tokenizer.pad_token_id))
        rows = together[index * SAMPLES : (index + 1) * SAMPLES, : alone.shape[1]]
        torch.testing.assert_close(rows, alone, atol=1e-4, rtol=0.0)


def test_an_entropy_is_that_of_the_distribution_of_its_token(
    folder: Path, task: SpellBackward
) -> None:
    model, tokenizer, groups = sampled(folder, task)
    batch = collate(groups, tokenizer.pad_token_id)
    found = response_statistics(model, batch, temperature=0.7, entropy=True).entropy
    one = groups[3][2]
    prompt, response = (turn.tokens for turn in one.turns)
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    expected = torch.distributions.Categorical(logits=logits / 0.7).entropy()
    assert found is not None
    row = found[3 * SAMPLES + 2]
    torch.testing.assert_close(row[: len(response)], expected, atol=1e-4, rtol=0.0)
    assert (row[len(response) :] == 0.0).all()
