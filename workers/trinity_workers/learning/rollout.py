"""Sampling answers from the policy with Hugging Face `generate`, and scoring them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .policy import isolated_rng
from .tasks import Question, Task

# An answer has at most four letters and its end; two more let a wrong one run on.
MAX_NEW_TOKENS = 7


@dataclass(frozen=True, slots=True)
class Rollout:
    """One question and S sampled answers to it: a group, in the words of GRPO.

    prompt_tokens: token ids of the prompt, without padding.
    responses: S lists of token ids, without padding, with the end of sequence as last id where it
        was produced.
    logprobs: S lists, one log-probability (in nats) a response token, under the policy and at the
        temperature that sampled it.
    rewards: S numbers, 0.0 or 1.0, to learn from.
    scores: S raw scores of the task's verifier, to show.
    """

    question: Question
    prompt_tokens: list[int]
    responses: list[list[int]]
    logprobs: list[list[float]]
    rewards: list[float]
    scores: list[float]


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    questions: Sequence[Question],
    *,
    samples: int,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> list[Rollout]:
    """Sample `samples` answers to each question, in one batch; one Rollout a question, in order.

    The same state of `generator` gives the same answers, and is advanced by one draw; None takes
    fresh entropy. torch's global generators are left as they were. Only one thread of a process may
    generate at a time.
    """
    if samples < 1 or max_new_tokens < 1:
        raise ValueError(
            f"samples and max_new_tokens must be at least 1, not {samples} and {max_new_tokens}"
        )
    if not questions:
        return []
    prompts = [tokenizer.encode(q.prompt, add_special_tokens=False) for q in questions]
    tokens, logprobs = _generate_tokens(
        model,
        tokenizer,
        prompts,
        samples=samples,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        generator=generator,
    )
    rollouts: list[Rollout] = []
    for index, (question, prompt) in enumerate(zip(questions, prompts, strict=True)):
        rollout = Rollout(question, prompt, responses=[], logprobs=[], rewards=[], scores=[])
        for row in range(index * samples, (index + 1) * samples):
            length, ended = _response_length(tokens[row], tokenizer.eos_token_id)
            response = tokens[row][:length]
            # Special tokens are kept: a padding token that was really sampled must spoil the
            # answer, not vanish from it.
            text = (
                str(tokenizer.decode(response[:-1], skip_special_tokens=False)) if ended else None
            )
            reward = task.reward(question, text)
            rollout.responses.append(response)
            rollout.logprobs.append(logprobs[row][:length])
            rollout.rewards.append(reward.exact)
            rollout.scores.append(reward.score)
        rollouts.append(rollout)
    return rollouts


def sampled_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    questions: Sequence[Question],
    *,
    samples: int = 1,
    max_new_tokens: int = MAX_NEW_TOKENS,
    generator: torch.Generator | None = None,
) -> float:
    """Share in [0, 1] of sampled answers that are exactly right: the number that GRPO raises."""
    rollouts = generate(
        model,
        tokenizer,
        task,
        questions,
        samples=samples,
        max_new_tokens=max_new_tokens,
        generator=generator,
    )
    rewards = [reward for rollout in rollouts for reward in rollout.rewards]
    return sum(rewards) / len(rewards) if rewards else 0.0


def _response_length(tokens: list[int], eos_token_id: int) -> tuple[int, bool]:
    """Length of the response with its end of sequence, and whether it has one."""
    try:
        return tokens.index(eos_token_id) + 1, True
    except ValueError:
        return len(tokens), False


def _generate_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    *,
    samples: int,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator | None,
) -> tuple[list[list[int]], list[list[float]]]:
    """New token ids and their log-probabilities, [questions x samples, T], T <= max_new_tokens."""
    width = max(len(prompt) for prompt in prompts)
    pad = tokenizer.pad_token_id
    device = model.device
    # Padded on the left, so that every row goes on from the last column; `generate` derives
    # position_ids from the mask.
    input_ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    attention_mask = torch.tensor(
        [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device
    )
    # top_k=0 and top_p=1 switch off the truncation that `generate` applies by default: the policy
    # that is sampled must be the one that is trained.
    configure: Any = GenerationConfig  # its constructor has no annotations
    configuration = configure(
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        num_return_sequences=samples,
        pad_token_id=pad,
        eos_token_id=tokenizer.eos_token_id,
        output_scores=True,
        return_dict_in_generate=True,
    )
    with _evaluation_mode(model), isolated_rng(_draw_seed(generator), device):
        run: Any = model.generate  # a mixin's, which type checkers do not see
        output = run(
            input_ids=input_ids, attention_mask=attention_mask, generation_config=configuration
        )
    new_tokens = output.sequences[:, width:]
    # The scores are the logits after the temperature, one [B, vocabulary] tensor a step.
    scores = torch.stack(output.scores, dim=1).float()
    logprobs = scores.log_softmax(dim=-1).gather(-1, new_tokens[..., None]).squeeze(-1)
    return new_tokens.tolist(), logprobs.tolist()


def _draw_seed(generator: torch.Generator | None) -> int:
    if generator is None:
        return torch.Generator().seed()
    seed = torch.randint(2**62, (), generator=generator, device=generator.device, dtype=torch.int64)
    return int(seed)


@contextmanager
def _evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(training)
