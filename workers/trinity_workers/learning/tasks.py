"""What the policy is asked, and how its answers are judged.

Questions and verdicts come from reasoning-gym, imported on first use: importing this module is
cheap and needs neither torch nor reasoning-gym. Every question belongs to one split for ever,
decided by a hash of its text: what is held out is never trained on, whatever the seed, the process
or the Python version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

Split = Literal["held-out", "validation", "training"]

# Of twenty buckets two (a tenth) are held out and one (a twentieth) is for validation: to decide
# when to stop the warm-up, for instance.
_BUCKETS = 20
_HELD_OUT_BUCKETS = 2
_VALIDATION_BUCKETS = 1

# A family's verifier adds up fractions, so "fully right" may come out a rounding error below one.
_EXACT_SCORE = 0.999

# Draws in a row without a new question after which a split counts as exhausted: several times the
# number of words, which is how long the last word of all takes on average.
_FRUITLESS_DRAWS = 50_000


@dataclass(frozen=True, slots=True)
class Question:
    """The prompt as the model sees it, the right answer, and what the verifier needs besides."""

    prompt: str
    answer: str
    metadata: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Reward:
    """The verdict on one answer.

    `exact` (0.0 or 1.0) is what the policy learns from. `score` is the family's raw score in [0, 1]
    and only shown beside it: it gives part credit, and a policy trained on it learns to collect
    that while its exact answers get worse.
    """

    exact: float
    score: float


class Task(Protocol):
    """A source of questions with a verifiable answer."""

    @property
    def name(self) -> str:
        """The name under which `make_task` finds it."""
        ...

    def training_questions(self, seed: int) -> Iterator[Question]:
        """Endless training questions, with repeats; the same ones for the same seed."""
        ...

    def held_out(self, count: int) -> list[Question]:
        """The first `count` distinct held-out questions, always the same ones."""
        ...

    def validation(self, count: int) -> list[Question]:
        """The first `count` distinct validation questions: neither trained on nor held out."""
        ...

    def reward(self, question: Question, text: str | None) -> Reward:
        """The verdict on `text`; None stands for an answer that did not end."""
        ...


def split_of(prompt: str) -> Split:
    """The split that a question belongs to.

    Upper and lower case are folded together, since verifiers ignore case: "Abe" in training would
    give away a held-out "abe".
    """
    digest = hashlib.sha256(prompt.casefold().encode()).digest()
    bucket = int.from_bytes(digest[:8], "big") % _BUCKETS
    if bucket < _HELD_OUT_BUCKETS:
        return "held-out"
    if bucket < _HELD_OUT_BUCKETS + _VALIDATION_BUCKETS:
        return "validation"
    return "training"


class SpellBackward:
    """reasoning-gym's `spell_backward`: `sun>` is answered by `nus`.

    Words of three and four letters: 6,592 of them, 5,651 for training, 648 held out and 293 for
    validation.
    """

    name = "spell-backward"

    @cached_property
    def _family(self) -> Any:
        import reasoning_gym

        return reasoning_gym.create_dataset(
            "spell_backward", seed=0, min_word_len=3, max_word_len=4
        )

    def training_questions(self, seed: int) -> Iterator[Question]:
        """Endless training questions, with repeats; the same ones for the same seed."""
        for question in self._draws(f"training:{seed}"):
            if split_of(question.prompt) == "training":
                yield question

    def held_out(self, count: int) -> list[Question]:
        """The first `count` distinct held-out questions; ValueError when there are not so many."""
        return self._distinct("held-out", count)

    def validation(self, count: int) -> list[Question]:
        """The first `count` distinct validation questions; ValueError if there are not so many."""
        return self._distinct("validation", count)

    def reward(self, question: Question, text: str | None) -> Reward:
        """The family's own verdict, which ignores case; an answer without an end earns nothing."""
        if text is None:
            return Reward(exact=0.0, score=0.0)
        entry = {
            "question": question.prompt,
            "answer": question.answer,
            "metadata": dict(question.metadata),
        }
        score = float(self._family.score_answer(text, entry))
        return Reward(exact=float(score >= _EXACT_SCORE), score=score)

    def _draws(self, stream: str) -> Iterator[Question]:
        # The family seeds entry i with (seed + i), so neighbouring seeds give one sequence shifted
        # by one. Starting every stream at a hashed index keeps streams apart, and one loaded
        # family serves them all.
        start = int.from_bytes(hashlib.sha256(f"{self.name}:{stream}".encode()).digest()[:7], "big")
        index = start
        while True:
            entry = self._family[index]
            word = entry["metadata"]["word"]
            yield Question(prompt=f"{word}>", answer=entry["answer"], metadata=entry["metadata"])
            index += 1

    def _distinct(self, split: Split, count: int) -> list[Question]:
        found: dict[str, Question] = {}
        draws = self._draws(split)
        fruitless = 0
        while len(found) < count:
            question = next(draws)
            if split_of(question.prompt) == split and question.prompt not in found:
                found[question.prompt] = question
                fruitless = 0
            elif (fruitless := fruitless + 1) == _FRUITLESS_DRAWS:
                raise ValueError(
                    f"task {self.name!r} has only about {len(found)} distinct {split} questions,"
                    f" {count} were asked for"
                )
        return list(found.values())


TASKS: dict[str, Callable[[], Task]] = {SpellBackward.name: SpellBackward}


def make_task(name: str) -> Task:
    """The task of that name; ValueError for a name that is not in `TASKS`."""
    try:
        make = TASKS[name]
    except KeyError:
        known = ", ".join(sorted(TASKS))
        raise ValueError(f"unknown task {name!r}: choose one of {known}") from None
    return make()
