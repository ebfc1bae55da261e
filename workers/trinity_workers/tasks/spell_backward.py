"""Built-in task: to spell a word backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .base import Answer, Question
from .drawn_task import DrawnTask

EXACT_SCORE = 0.999
"""Score from which an answer is right: a verifier adds up fractions, and may end just below 1."""


class SpellBackward(DrawnTask):
    """reasoning-gym's `spell_backward`: `sun>` is answered by `nus`.

    Words of three and four letters: 6,592 of them, 5,651 for training, 648 held out and 293 for
    validation.
    """

    name = "spell-backward"
    family = "spell_backward"
    package = "algorithmic"
    options: ClassVar = {"min_word_len": 3, "max_word_len": 4}
    answer_tokens = 7
    warm_up_accuracy = 0.2

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

    def _question(self, entry: Mapping[str, Any]) -> Question:
        return Question(prompt=f"{entry['metadata']['word']}>", answer=entry["answer"])

    def _content(self) -> list[str]:
        return list(self._family.words)
