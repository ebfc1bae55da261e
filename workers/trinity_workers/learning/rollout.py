"""Sampling answers from the policy with Hugging Face `generate`, and judging them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..rewards import Rewarded, RewardFailed, Rewards
from ..tasks import Answer, Question, TaskError
from .policy import encode_prompt, end_tokens

MAX_NEW_TOKENS = 7
"""Tokens of an answer of the built-in task: four letters, its end, and two for a wrong one."""


@dataclass(frozen=True, slots=True)
class Samples:
    """One question and S sampled answers to it: a group, in the words of GRPO.

    prompt_tokens: token ids of the prompt, without padding.
    responses: S lists of token ids, without padding, with the end of sequence as last id where it
        was produced.
    logprobs: S lists, one log-probability (in nats) a response token, under the policy and at the
        temperature that sampled it.
    answers: S answers, as a reward function gets them.
    """

    question: Question
    prompt_tokens: list[int]
    responses: list[list[int]]
    logprobs: list[list[float]]
    answers: list[Answer]

    def judged(self, found: Sequence[Rewarded]) -> Rollout:
        """Return the group with the rewards of its answers."""
        return Rollout(
            self.question,
            self.prompt_tokens,
            self.responses,
            self.logprobs,
            rewards=[one.reward for one in found],
            scores=[one.score for one in found],
        )


@dataclass(frozen=True, slots=True)
class Rollout:
    """A group with its rewards: `rewards` are learned from, and `scores` shown beside them."""

    question: Question
    prompt_tokens: list[int]
    responses: list[list[int]]
    logprobs: list[list[float]]
    rewards: list[float]
    scores: list[float]


def seed_of(*key: object) -> int:
    """Return the seed of a group's samples: the same key has the same one in every process."""
    digest = hashlib.sha256(":".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    *,
    seeds: Sequence[int],
    samples: int,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = 1.0,
) -> list[Samples]:
    """Sample `samples` answers to each question, in one batch; one group a question, in order.

    Each question has a seed of its own, from which its samples' randomness follows, whatever else
    is in the batch. The model's own generation defaults are not applied, except for its ends of
    sequence: the policy that is sampled must be the one that is trained. Only one thread of a
    process may generate at a time.

    Raises:
        TaskError: if a prompt leaves no room for an answer.
        BadPolicy: if a prompt has chat messages, and the tokenizer no template for them.
    """
    if samples < 1 or max_new_tokens < 1:
        raise ValueError(
            f"samples and max_new_tokens must be at least 1, not {samples} and {max_new_tokens}"
        )
    if not questions:
        return []
    prompts = [encode_prompt(tokenizer, question.prompt) for question in questions]
    _check_lengths(model, prompts, max_new_tokens)
    ends = end_tokens(model, tokenizer)
    choice = SeededChoice(seeds, samples, temperature, model.device)
    tokens = _generate_tokens(
        model, prompts, choice, ends, pad=tokenizer.pad_token_id, max_new_tokens=max_new_tokens
    )
    logprobs = torch.stack(choice.logprobs, dim=1).tolist()
    groups: list[Samples] = []
    for index, (question, prompt) in enumerate(zip(questions, prompts, strict=True)):
        group = Samples(question, prompt, responses=[], logprobs=[], answers=[])
        for row in range(index * samples, (index + 1) * samples):
            response, ended = _response(tokens[row], ends)
            # Special tokens are kept: a padding token that was really sampled must spoil the
            # answer, not vanish from it.
            text = str(
                tokenizer.decode(response[:-1] if ended else response, skip_special_tokens=False)
            )
            group.responses.append(response)
            group.logprobs.append(logprobs[row][: len(response)])
            group.answers.append(_answer(question, text, ended, len(response)))
        groups.append(group)
    return groups


async def judge_all(rewards: Rewards, groups: Sequence[Samples]) -> list[Rollout | RewardFailed]:
    """Judge groups side by side; a group whose rewards failed has its error in its place."""
    judged: list[Rollout | RewardFailed] = []

    async def judge(index: int, group: Samples) -> None:
        try:
            judged[index] = group.judged(await rewards.judge(group.question, group.answers))
        except RewardFailed as error:
            judged[index] = error

    async with anyio.create_task_group() as tasks:
        for index, group in enumerate(groups):
            judged.append(RewardFailed("not judged yet"))
            tasks.start_soon(judge, index, group)
    return judged


class SeededChoice(LogitsProcessor):
    """Choice of the next token by Gumbel noise of each question's own seed.

    It leaves one token for greedy decoding to take, and keeps its log-probability.

    Args:
        seeds: One a question.
        samples: Rows of the batch that each question has.
        temperature: Temperature of sampling.
        device: Device of the model.
    """

    def __init__(
        self, seeds: Sequence[int], samples: int, temperature: float, device: torch.device
    ) -> None:
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self.samples = samples
        self._temperature = temperature
        self.logprobs: list[Tensor] = []
        """Of each token chosen so far, one [rows] tensor a token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores that leave one token in each row."""
        del input_ids
        logprobs = (scores.float() / self._temperature).log_softmax(dim=-1)
        noise = torch.empty_like(logprobs)
        for index, generator in enumerate(self._generators):
            start = index * self.samples
            noise[start : start + self.samples].exponential_(generator=generator)
        noise.clamp_(min=torch.finfo(noise.dtype).tiny)
        chosen = (logprobs - noise.log_()).argmax(dim=-1, keepdim=True)
        self.logprobs.append(logprobs.gather(-1, chosen).squeeze(-1))
        return torch.full_like(scores, float("-inf")).scatter_(-1, chosen, 0.0)


def _check_lengths(model: Any, prompts: Sequence[list[int]], max_new_tokens: int) -> None:
    longest = max(len(prompt) for prompt in prompts)
    if min(len(prompt) for prompt in prompts) == 0:
        raise TaskError("a prompt has no tokens")
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and longest + max_new_tokens > most:
        raise TaskError(
            f"a prompt has {longest} tokens, and its answer may have {max_new_tokens} "
            f"(rollouts.max_new_tokens): the model takes {most} in all"
        )


def _response(tokens: list[int], ends: frozenset[int]) -> tuple[list[int], bool]:
    """Return the response with its end of sequence, and True if it has one."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1], True
    return tokens, False


def _answer(question: Question, text: str, finished: bool, tokens: int) -> Answer:
    messages = [*question.messages(), {"role": "assistant", "content": text}]
    return Answer(text=text, finished=finished, messages=messages, tokens=tokens)


def _generate_tokens(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    choice: SeededChoice,
    ends: frozenset[int],
    *,
    pad: int,
    max_new_tokens: int,
) -> list[list[int]]:
    """Return new token ids, [questions x samples, T], T <= max_new_tokens."""
    width = max(len(prompt) for prompt in prompts)
    device = model.device
    # Padded on the left, so that every row goes on from the last column; `generate` derives
    # position_ids from the mask.
    input_ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    attention_mask = torch.tensor(
        [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device
    )
    configure: Any = GenerationConfig  # its constructor has no annotations
    configuration = configure(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        eos_token_id=sorted(ends),
    )
    samples = choice.samples
    with _evaluation_mode(model), torch.inference_mode():
        run: Any = model.generate  # a mixin's, which type checkers do not see
        output = run(
            input_ids=input_ids.repeat_interleave(samples, dim=0),
            attention_mask=attention_mask.repeat_interleave(samples, dim=0),
            generation_config=configuration,
            logits_processor=LogitsProcessorList([choice]),
        )
    tokens: list[list[int]] = output[:, width:].tolist()
    return tokens


@contextmanager
def _evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Switch off training, and the model's own generation defaults, for the block."""
    training, defaults = model.training, model.generation_config
    configure: Any = GenerationConfig
    model.train(False)
    model.generation_config = configure()
    try:
        yield
    finally:
        model.generation_config = defaults
        model.train(training)
