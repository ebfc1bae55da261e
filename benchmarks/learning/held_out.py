"""Measurement of a policy on held-out questions, by the exact text of its answers."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trinity_schemas import Sampling, StepRef
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.learning.policy import encode_prompt
from trinity_workers.rollout_engines.base import GenerationRequest
from trinity_workers.rollout_engines.huggingface import HuggingFaceEngine
from trinity_workers.tasks import Answer, built_in_task

from .results import Measured

QUESTIONS = 256
SAMPLES = 4
"""Answers that are sampled to each question."""
_SEED = 2**40
"""Seed of the samples, the same at every step, which no run's seed is."""


class Ruler:
    """Measure of one task; questions and random numbers are the same for every policy.

    Args:
        config: Settings of the run.
        tokenizer: The policy's tokenizer.
    """

    def __init__(self, config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._task = built_in_task(config.task.name, config.seed)
        self._questions = [
            question for question in self._task.held_out(QUESTIONS) for _ in range(SAMPLES)
        ]
        sampling = Sampling(max_new_tokens=config.rollouts.max_new_tokens, seed=_SEED)
        self._requests = [
            GenerationRequest(
                tokens=encode_prompt(tokenizer, question.prompt),
                sampling=sampling,
                ordinal=place // SAMPLES,
                sample=place % SAMPLES,
                turn=0,
            )
            for place, question in enumerate(self._questions)
        ]

    def measure(self, model: PreTrainedModel, step: int) -> Measured:
        """Return the shares of sampled answers that are exactly right, and that are rewarded."""
        training = model.training
        model.train(False)
        engine = HuggingFaceEngine(model, self._tokenizer, serves=StepRef(1, step))
        exact = rewarded = 0.0
        generations = engine.generate_here(self._requests)
        for question, generation in zip(self._questions, generations, strict=True):
            tokens = generation.tokens[:-1] if generation.finished else generation.tokens
            text = str(self._tokenizer.decode(tokens, skip_special_tokens=False))
            answer = Answer(
                text=text, finished=generation.finished, messages=[], tokens=len(generation.tokens)
            )
            exact += generation.finished and text == question.answer
            rewarded += self._task.reward(question, answer)["reward"]
        model.train(training)
        return Measured(
            step=step,
            exact=exact / len(generations),
            rewarded=rewarded / len(generations),
            answers=len(generations),
        )
