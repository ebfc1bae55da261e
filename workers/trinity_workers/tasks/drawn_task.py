"""Base of the built-in tasks: questions drawn from a reasoning-gym family, judged exactly."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar

from trinity_events.errors import PackageMissing

from .base import Answer, Question
from .errors import TooFewQuestions
from .families import create_family
from .splits import Split, split_of

_FRUITLESS_DRAWS = 50_000
"""Draws in a row without a new question, after which a split counts as exhausted.

It is several times the number of words, the average number of draws until the last word comes up.
"""


class DrawnTask(ABC):
    """Task of short questions that a reasoning-gym family draws, without a list of them.

    reasoning-gym is imported on first use. The small built-in model can be warmed up on it.

    Args:
        seed: Seed of the order of the questions.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    """Name of the family, and of its module."""
    package: ClassVar[str]
    """Package of reasoning-gym that has the family's module."""
    options: ClassVar[Mapping[str, Any]]
    """Options of the family."""
    answer_tokens: ClassVar[int]
    """Tokens for an answer in the warm-up: the longest one, its end, and one or two more."""
    warm_up_accuracy: ClassVar[float]
    """Share of right answers at which the warm-up ends."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @abstractmethod
    def _question(self, entry: Mapping[str, Any]) -> Question:
        """Return the question of the family's entry."""

    def _split(self, question: Question) -> Split:
        """Return the split of a question; equivalent questions share one."""
        return split_of(str(question.prompt))

    def _content(self) -> list[str]:
        """Return what the family draws from, for the fingerprint."""
        return [self.family, *(f"{name}={value}" for name, value in self.options.items())]

    def reward(self, question: Question, answer: Answer) -> dict[str, float]:
        """Return 1 for exactly the right text and its end, else 0."""
        return {"reward": float(answer.finished and answer.text == question.answer)}

    @cached_property
    def _family(self) -> Any:
        # One seed for all runs: the order of questions comes from their indices (see _index).
        try:
            return create_family(self.package, self.family, {"seed": 0, **self.options})
        except ImportError:
            raise PackageMissing(
                f"task {self.name}", "reasoning-gym", "trinity-events[workers]"
            ) from None

    @cached_property
    def fingerprint(self) -> str:
        """Digest of what is asked, and of its order."""
        content = "\n".join([self.name, str(self.seed), *self._content()])
        return f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"

    def question(self, ordinal: int) -> Question:
        """Return the first draw of the training split, of the draws that belong to the ordinal."""
        # Draws of its own for each ordinal: a question follows from its ordinal without state.
        draw = 0
        while True:
            question = self._entry(self._index(f"{self.seed}:{ordinal}:{draw}"))
            if self._split(question) == "training":
                return question
            draw += 1

    def training_questions(self, seed: int) -> Iterator[Question]:
        """Yield endless training questions, with repeats; the same ones for the same seed."""
        return self._split_draws("training", f"training:{seed}")

    def held_out(self, count: int) -> list[Question]:
        """Return the first `count` distinct held-out questions. Raises TaskError if there are less.

        They are the same for every seed.
        """
        return self._distinct("held-out", count)

    def validation(self, count: int) -> list[Question]:
        """Return the first `count` distinct validation questions. Raises TaskError as above."""
        return self._distinct("validation", count)

    def _index(self, stream: str) -> int:
        # The family seeds entry i with (seed + i), so neighbouring indices would give one sequence
        # shifted by one.
        return int.from_bytes(hashlib.sha256(f"{self.name}:{stream}".encode()).digest()[:7], "big")

    def _entry(self, index: int) -> Question:
        return self._question(self._family[index])

    def _split_draws(self, split: Split, stream: str) -> Iterator[Question]:
        for question in self._draws(stream):
            if self._split(question) == split:
                yield question

    def _draws(self, stream: str) -> Iterator[Question]:
        # From a hashed begin on, by one each: streams of other names do not overlap but by chance.
        index = self._index(stream)
        while True:
            yield self._entry(index)
            index += 1

    def _distinct(self, split: Split, count: int) -> list[Question]:
        questions: dict[str, Question] = {}
        draws = self._draws(split)
        fruitless = 0
        while len(questions) < count:
            question = next(draws)
            prompt = str(question.prompt)
            if self._split(question) == split and prompt not in questions:
                questions[prompt] = question
                fruitless = 0
            # In a row: each new question shows that the split has not ended.
            elif (fruitless := fruitless + 1) == _FRUITLESS_DRAWS:
                raise TooFewQuestions(self.name, split, len(questions), count)
        return list(questions.values())
