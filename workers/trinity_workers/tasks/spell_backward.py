"""The built-in task: to spell a word backward."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from .base import Answer, Question, TaskError
from .splits import Split, split_of

EXACT_SCORE = 0.999
"""Score from which an answer is right: a verifier adds up fractions, and may end just below 1."""
_FRUITLESS_DRAWS = 50_000
"""Draws in a row without a new question, after which a split counts as exhausted.

It is several times the number of words, the average number of draws until the last word comes up.
"""


class SpellBackward:
    """reasoning-gym's `spell_backward`: `sun>` is answered by `nus`.

    Words of three and four letters: 6,592 of them, 5,651 for training, 648 held out and 293 for
    validation. reasoning-gym is imported on first use.

    Args:
        seed: Seed of the order of the questions.
    """

    name = "spell-backward"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @cached_property
    def _family(self) -> Any:
        try:
            import reasoning_gym
        except ImportError:
            raise TaskError(
                "task spell-backward needs reasoning-gym: pip install 'trinity-events[workers]'"
            ) from None
        return reasoning_gym.create_dataset(
            "spell_backward", seed=0, min_word_len=3, max_word_len=4
        )

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the words and of their order."""
        content = "\n".join([self.name, str(self.seed), *self._family.words])
        return f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"

    def question(self, ordinal: int) -> Question:
        """Return the first draw of the training split, of the draws that belong to the ordinal."""
        draw = 0
        while True:
            question = self._entry(self._index(f"{self.seed}:{ordinal}:{draw}"))
            if split_of(str(question.prompt)) == "training":
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

    def reward(self, question: Question, answer: Answer) -> dict[str, float]:
        """Judge an answer as the family does, which ignores case; one without an end earns 0.

        The policy learns from `reward`, 0 or 1. The family's `score` gives part credit: a policy
        trained on it collects that, while its exact answers get worse.
        """
        score = 0.0
        if answer.finished:
            entry = {"question": question.prompt, "answer": question.answer, "metadata": {}}
            score = float(self._family.score_answer(answer.text, entry))
        return {"reward": float(score >= EXACT_SCORE), "score": score}

    def _index(self, stream: str) -> int:
        # The family seeds entry i with (seed + i), so neighbouring indices would give one sequence
        # shifted by one.
        return int.from_bytes(hashlib.sha256(f"{self.name}:{stream}".encode()).digest()[:7], "big")

    def _entry(self, index: int) -> Question:
        entry = self._family[index]
        return Question(prompt=f"{entry['metadata']['word']}>", answer=entry["answer"])

    def _split_draws(self, split: Split, stream: str) -> Iterator[Question]:
        for question in self._draws(stream):
            if split_of(str(question.prompt)) == split:
                yield question

    def _draws(self, stream: str) -> Iterator[Question]:
        index = self._index(stream)
        while True:
            yield self._entry(index)
            index += 1

    def _distinct(self, split: Split, count: int) -> list[Question]:
        found: dict[str, Question] = {}
        draws = self._draws(split)
        fruitless = 0
        while len(found) < count:
            question = next(draws)
            prompt = str(question.prompt)
            if split_of(prompt) == split and prompt not in found:
                found[prompt] = question
                fruitless = 0
            elif (fruitless := fruitless + 1) == _FRUITLESS_DRAWS:
                raise TaskError(
                    f"task {self.name!r} has only about {len(found)} distinct {split} questions, "
                    f"and {count} were asked for: ask for fewer"
                )
        return list(found.values())
