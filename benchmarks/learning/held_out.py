"""Measurement of a policy on held-out questions, by the exact text of its answers."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trinity_schemas import Sampling, StepRef
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.learning.policy import encode_prompt
from trinity_workers.rollout_engines.base import Generation, GenerationRequest
from trinity_workers.rollout_engines.huggingface import HuggingFaceEngine
from trinity_workers.tasks import Answer, Question, built_in_task

from .results import Measured

QUESTIONS = 256
SAMPLES = 4
"""Answers that are sampled to each question."""
_SEED = 2**40
"""Seed of the samples, the same at every step, which no run's seed is."""


def make_requests(
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    sampling: Sampling,
    samples: int = 1,
) -> list[GenerationRequest]:
    """Return requests for several answers to each question, one question after the other."""
    return [
        GenerationRequest(
            tokens=encode_prompt(tokenizer, question.prompt),
            sampling=sampling,
            ordinal=ordinal,
            sample=sample,
            turn=0,
        )
        for ordinal, question in enumerate(questions)
        for sample in range(samples)
    ]


def read_answer(tokenizer: PreTrainedTokenizerBase, generation: Generation) -> Answer:
    """Return an answer as a task judges it: the text without the token that ended it."""
    tokens = generation.tokens[:-1] if generation.finished else generation.tokens
    return Answer(
        text=str(tokenizer.decode(tokens, skip_special_tokens=False)),
        finished=generation.finished,
        messages=[],
        tokens=len(generation.tokens),
    )


class Ruler:
    """Measure of one task; questions and random numbers are the same for every policy.

    Args:
        config: Settings of the run.
        tokenizer: The policy's tokenizer.
    """

    def __init__(self, config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._task = built_in_task(config.task.name, config.seed)
        questions = self._task.held_out(QUESTIONS)
        sampling = Sampling(max_new_tokens=config.rollouts.max_new_tokens, seed=_SEED)
        self._requests = make_requests(tokenizer, questions, sampling, SAMPLES)
        self._questions = [question for question in questions for _ in range(SAMPLES)]
        """Question of each request."""

    def measure(self, model: PreTrainedModel, step: int) -> Measured:
        """Return the shares of sampled answers that are exactly right, and that are rewarded."""
        training = model.training
        model.train(False)
        engine = HuggingFaceEngine(model, self._tokenizer, serves=StepRef(1, step))
        exact = rewarded = 0.0
        generations = engine.generate_here(self._requests)
        for question, generation in zip(self._questions, generations, strict=True):
            answer = read_answer(self._tokenizer, generation)
            exact += answer.finished and answer.text == question.answer
            rewarded += self._task.reward(question, answer)["reward"]
        model.train(training)
        return Measured(
            step=step,
            exact=exact / len(generations),
            rewarded=rewarded / len(generations),
            answers=len(generations),
        )
