"""Several sets of questions, mixed by weights.

1. The set of an ordinal, and the question's place in that set's order, follow from names, weights,
   seed and ordinal alone. There is no state: a resume, another explorer and another process agree.
2. Of any consecutive ordinals, each set has its share by weight, less or more than that by fewer
   than twice the number of sets.
3. A set's draws are the consecutive ordinals of its own :class:`QuestionSet`: each of its questions
   is asked once in each of its passes. A set that ends before the others begins its next pass.
4. The order in which a configuration lists the sets, and a common factor of the weights, change
   nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import msgspec

from .base import Question
from .errors import MixRefused
from .question_set import QuestionSet, encode_content

_PHASES = 1 << 64
"""Denominator of the phases, which are 64 bits of a digest."""


class WeightedMix:
    """Endless order of draws from sets, each with its share by weight.

    One set after another takes its draws from those that the sets before it leave, as evenly spaced
    as its share of these allows (a Beatty sequence). Arithmetic is exact, so that no process rounds
    differently.

    Args:
        weights: Weight of each set by name: positive and finite.
        seed: Seed of the places where the sequences begin; None begins each at 0.

    Raises:
        MixRefused: A weight is not positive and finite, or there is no set.
    """

    def __init__(self, weights: Mapping[str, float], seed: int | None = 0) -> None:
        if not weights:
            raise MixRefused("none")
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise MixRefused("weight", name, weight)
        # Exact, and in the order of the names: every process draws the same mix.
        exact = {name: Fraction(weights[name]) for name in sorted(weights)}
        total = sum(exact.values(), Fraction())
        self.shares = {name: weight / total for name, weight in exact.items()}
        """Share of each set, in the order of the names; their sum is 1."""
        self._sequences: list[_Sequence] = []
        remaining = Fraction(1)
        for name, share in self.shares.items():
            self._sequences.append(_Sequence(name, share / remaining, _phase(name, seed)))
            remaining -= share

    def draw(self, ordinal: int) -> tuple[str, int]:
        """Return the set of an ordinal, and the number of the set's draws before it."""
        place = ordinal  # among the draws that the sets before leave
        for sequence in self._sequences:
            before, after = sequence.count(place), sequence.count(place + 1)
            if after > before:
                return sequence.name, before
            place -= before
        raise AssertionError("the last set takes every draw that is left")


class _Sequence(NamedTuple):
    """Evenly spaced draws of one set, of those that the sets before it leave."""

    name: str
    share: Fraction
    phase: Fraction

    def count(self, draws: int) -> int:
        """Return the number of the set's draws among the first ones."""
        return math.floor(draws * self.share + self.phase)


def _phase(name: str, seed: int | None) -> Fraction:
    """Return a number from 0 to below 1, of which no whole draw is left at the ordinal 0."""
    if seed is None:
        return Fraction()
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return Fraction(int.from_bytes(digest[:8], "big"), _PHASES)


class MixedQuestions:
    """Task of several sets of questions, of which each has its share of the questions asked.

    Args:
        sets: The questions of each set by name.
        weights: Weight of each set.
        seed: Seed of the mix, and of the orders within the sets.
        shuffle: If False, every pass over a set has the order of its source, and the mix does not
            depend on the seed.
        evaluation: Other questions to measure on; without them a tenth of each set is held out.

    Raises:
        TaskError: A set has no question to train on, a weight is not positive and finite, or the
            questions of two sets do not have the same fields.
    """

    def __init__(
        self,
        sets: Mapping[str, Sequence[Question]],
        weights: Mapping[str, float],
        *,
        seed: int = 0,
        shuffle: bool = True,
        evaluation: Sequence[Question] | None = None,
    ) -> None:
        self.name = " + ".join(sorted(sets))
        self.mix = WeightedMix(weights, seed if shuffle else None)
        self._evaluation = evaluation
        _check_same_fields(sets)
        self.sets = {
            name: QuestionSet(
                f"task.sets.{name}",
                # Named here: rewards of families find their verifier by the set.
                [msgspec.structs.replace(question, set=name) for question in sets[name]],
                seed=_seed(seed, name),
                shuffle=shuffle,
                # Empty, not None: no set holds out questions of its own where others are given.
                evaluation=None if evaluation is None else (),
            )
            for name in self.mix.shares
        }
        """Task of each set, in the order of the names."""

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the questions of all sets, of their weights, and of what decides the order."""
        sets = [
            [name, str(self.mix.shares[name]), questions.fingerprint]
            for name, questions in self.sets.items()
        ]
        encoded = msgspec.json.encode(sets) + encode_content(self._evaluation or ())
        return f"sha256:{hashlib.sha256(encoded).hexdigest()}"

    def question(self, ordinal: int) -> Question:
        """Return the question at the ordinal, which names its set."""
        name, draw = self.mix.draw(ordinal)
        return self.sets[name].question(draw)

    def held_out(self, count: int) -> list[Question]:
        """Return at most `count` questions that are not trained on.

        Each set has its share by weight among the first ones, as long as it holds out enough.
        """
        if self._evaluation is not None:
            return list(self._evaluation[:count])
        places = [
            # The order of Webster's method: the set with the smallest (2n + 1) / share is next.
            ((2 * place + 1) / self.mix.shares[name], name, question)
            for name, questions in self.sets.items()
            for place, question in enumerate(questions.held_out(count))
        ]
        return [question for *_, question in sorted(places, key=lambda place: place[:2])[:count]]


def _seed(seed: int, name: str) -> int:
    """Return the seed of a set's orders: two sets of one size have different orders."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}:order".encode()).digest()[:7], "big")


def _check_same_fields(sets: Mapping[str, Sequence[Question]]) -> None:
    """Raise MixRefused if the questions of two sets differ in fields, which one reward reads."""
    fields = {name: _find_fields(questions) for name, questions in sorted(sets.items())}
    # Neighbours are enough: if all of them agree, all sets do.
    for (name, own), (following, others) in pairwise(fields.items()):
        for having, lacking, missing in (
            (name, following, sorted(own - others)),
            (following, name, sorted(others - own)),
        ):
            if missing:
                raise MixRefused("fields", having, other=lacking, missing=tuple(missing))


def _find_fields(questions: Sequence[Question]) -> frozenset[str]:
    """Return what the questions of a set have, each of which at least one of them has."""
    fields = set()
    for question in questions:
        is_text = isinstance(question.prompt, str)
        fields.add("prompts of text" if is_text else "prompts of chat messages")
        fields.update(f"the field {name!r}" for name in question.data)
        if question.answer is not None:
            fields.add("right answers")
    return frozenset(fields)
