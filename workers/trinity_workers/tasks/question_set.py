"""Questions from a finite source, in an endless order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import msgspec
from msgspec import Struct

from .base import Question
from .errors import NoQuestions
from .splits import prompt_text, split_of


class QuestionSet:
    """Task of a finite list of questions: pass after pass over it, each in an order of its own.

    Without `evaluation`, a tenth of the questions is held out, by a hash of the prompt.

    Args:
        name: Name of the source, for messages.
        questions: The questions; duplicates are kept.
        seed: Seed of the orders.
        shuffle: If False, every pass has the order of the source.
        evaluation: Other questions to measure on; then none of `questions` is held out.
    """

    def __init__(
        self,
        name: str,
        questions: Sequence[Question],
        *,
        seed: int = 0,
        shuffle: bool = True,
        evaluation: Sequence[Question] | None = None,
    ) -> None:
        self.name = name
        self.seed = seed
        self.shuffle = shuffle
        # All of them: the fingerprint is also of what is held out.
        self._all = questions
        # By instance: sets that are mixed do not evict each other's orders.
        self._order = lru_cache(maxsize=4)(_make_order)
        self._evaluation = evaluation
        if evaluation is None:
            held_out = [split_of(prompt_text(question)) == "held-out" for question in questions]
            pairs = list(zip(questions, held_out, strict=True))
            self._training = [question for question, is_held_out in pairs if not is_held_out]
            self._held_out = [question for question, is_held_out in pairs if is_held_out]
        else:
            self._training, self._held_out = list(questions), list(evaluation)
        if not self._training:
            raise NoQuestions(name, "held out" if questions else "training")

    def __len__(self) -> int:
        """Return the number of training questions, which one pass asks."""
        return len(self._training)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all questions, and of what decides their order."""
        digest = hashlib.sha256()
        settings = [self.seed if self.shuffle else None, self._evaluation is not None]
        for encoded in (
            msgspec.json.encode(settings),
            encode_content(self._all),
            encode_content(self._evaluation or ()),
        ):
            # With the lengths: a question that moves from one list to the other changes the digest.
            digest.update(len(encoded).to_bytes(8, "big"))
            digest.update(encoded)
        return f"sha256:{digest.hexdigest()}"

    def question(self, ordinal: int) -> Question:
        """Return the question at the ordinal: a place in the pass that the ordinal falls into."""
        # The number of the pass decides its order, so that a resume needs no state.
        number, place = divmod(ordinal, len(self._training))
        if not self.shuffle:
            return self._training[place]
        return self._training[self._order(len(self._training), self.seed, number)[place]]

    def held_out(self, count: int) -> list[Question]:
        """Return the first questions of those that are not trained on, at most `count`."""
        return self._held_out[:count]


class _Content(Struct, frozen=True):
    """Fields of a question that its content consists of; the name of its set is none of them."""

    prompt: Any
    answer: Any
    data: dict[str, Any]


def encode_content(questions: Iterable[Question]) -> bytes:
    """Return the content of questions as JSON, of which fingerprints are digests."""
    contents = [_Content(each.prompt, each.answer, each.data) for each in questions]
    return msgspec.json.encode(contents, order="deterministic")


def _make_order(count: int, seed: int, number: int) -> tuple[int, ...]:
    """Return the order of a pass: places sorted by a hash, the same in every Python version."""
    start = hashlib.sha256(f"{seed}:{number}:".encode())

    def key(place: int) -> bytes:
        state = start.copy()
        state.update(str(place).encode())
        return state.digest()

    return tuple(sorted(range(count), key=key))
