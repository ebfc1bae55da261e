"""Log-probabilities of responses, as the trainer computes them."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest

from tests.support.errors import raises
from trinity_workers.learning.pretrained import FusedLossRefused

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
        generations = engine.generate_here(requests)
        rewards = [float(lot.random() < 0.5) for _ in generations]
        groups.append(
            group(
                prompt,
                [generation.tokens for generation in generations],
                [generation.logprobs for generation in generations],
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
    for index, experiences in enumerate(groups):
        alone = response_logprobs(model, collate([experiences], tokenizer.pad_token_id))
        rows = together[index * SAMPLES : (index + 1) * SAMPLES, : alone.shape[1]]
        torch.testing.assert_close(rows, alone, atol=1e-4, rtol=0.0)


def test_an_entropy_is_that_of_the_distribution_of_its_token(
    folder: Path, task: SpellBackward
) -> None:
    model, tokenizer, groups = sampled(folder, task)
    batch = collate(groups, tokenizer.pad_token_id)
    entropies = response_statistics(model, batch, temperature=0.7, entropy=True).entropy
    sample = groups[3][2]
    prompt, response = ([*turn.tokens] for turn in sample.turns)
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    expected = torch.distributions.Categorical(logits=logits / 0.7).entropy()
    assert entropies is not None
    row = entropies[3 * SAMPLES + 2]
    torch.testing.assert_close(row[: len(response)], expected, atol=1e-4, rtol=0.0)
    assert (row[len(response) :] == 0.0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fused_head_gives_what_whole_logits_give_and_their_gradients(
    folder: Path, task: SpellBackward, dtype: str
) -> None:
    *_, groups = sampled(folder, task)
    model, tokenizer = policy.load_policy(folder, dtype)
    batch = collate(groups, tokenizer.pad_token_id)
    tolerance = 1e-5 if dtype == "float32" else 0.02
    results = []
    for fused in (False, True):
        statistics = response_statistics(model, batch, temperature=0.7, entropy=True, fused=fused)
        model.zero_grad()
        (statistics.logprobs - 0.1 * statistics.entropy).mean().backward()
        gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
        results.append((statistics, gradients))
    (plain, expected), (fused, gradients) = results
    torch.testing.assert_close(fused.logprobs, plain.logprobs, atol=tolerance, rtol=0.0)
    torch.testing.assert_close(fused.entropy, plain.entropy, atol=tolerance, rtol=0.0)
    for name, value in expected.items():
        bound = tolerance * float(value.abs().max())
        torch.testing.assert_close(gradients[name], value, atol=bound, rtol=0.0)
    assert model(input_ids=batch.input_ids).logits.shape[-1] == len(tokenizer), "as it was"


def test_a_model_that_changes_its_logits_is_not_fused(task: SpellBackward, folder: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    *_, tokenizer, groups = sampled(folder, task)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=len(tokenizer), **sizes, **heads))
    with raises(FusedLossRefused, fault="logits"):
        response_logprobs(model, collate(groups, tokenizer.pad_token_id), fused=True)
