"""Built-in task: to sort digits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .base import Question
from .drawn_task import DrawnTask
from .splits import Split, split_of

_ASCENDING, _DESCENDING = "<", ">"


class SortDigits(DrawnTask):
    """reasoning-gym's `number_sorting`, with digits.

    `7 0 5 3>` is answered by `7 5 3 0`, and `7 0 5 3<` by `0 3 5 7`. There are four or five
    digits. The family's own verifier takes an error of one for right, so it is no reward: a policy
    that is trained on it gets worse.
    """

    name = "sort-digits"
    family = "number_sorting"
    package = "algorithmic"
    options: ClassVar = {
        "min_numbers": 4,
        "max_numbers": 5,
        "min_decimals": 0,
        "max_decimals": 0,
        "min_value": 0,
        "max_value": 9,
    }
    answer_tokens = 11
    warm_up_accuracy = 0.25

    def _question(self, entry: Mapping[str, Any]) -> Question:
        data = entry["metadata"]
        order = _ASCENDING if data["direction"] == "ascending" else _DESCENDING
        numbers, right = (_digits(data[name]) for name in ("original_numbers", "sorted_numbers"))
        return Question(prompt=numbers + order, answer=right)

    def _split(self, question: Question) -> Split:
        # All orders of the same digits, and both directions, belong together.
        return split_of(" ".join(sorted(str(question.answer).split())))


def _digits(numbers: list[str]) -> str:
    return " ".join(str(int(float(number))) for number in numbers)
