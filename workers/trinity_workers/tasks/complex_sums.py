"""Built-in task: sums and differences of complex numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .base import Question
from .drawn_task import DrawnTask
from .splits import Split, split_of


class ComplexSums(DrawnTask):
    """reasoning-gym's `complex_arithmetic`: `9+5i-(5+8i)=` is answered by `4-3i`.

    Real and imaginary parts are 0 to 9.
    """

    name = "complex-sums"
    family = "complex_arithmetic"
    package = "algebra"
    options: ClassVar = {
        "min_real": 0,
        "max_real": 9,
        "min_imag": 0,
        "max_imag": 9,
        "operations": ("+", "-"),
        "operations_weights": [0.5, 0.5],
    }
    answer_tokens = 9
    warm_up_accuracy = 0.25

    def _question(self, entry: Mapping[str, Any]) -> Question:
        data = entry["metadata"]
        first, second = _written(data["num1"]), _written(data["num2"])
        operation = data["operation"]
        return Question(
            prompt=f"{first}{operation}({second})=",
            answer=_written(data["result"]),
            data={"operands": [first, second], "operation": operation},
        )

    def _split(self, question: Question) -> Split:
        operands, operation = question.data["operands"], question.data["operation"]
        if operation == "+":  # a sum in the other order is the same question
            operands = sorted(operands)
        return split_of(operation.join(operands))


def _written(number: tuple[float, float]) -> str:
    real, imaginary = (int(part) for part in number)
    return f"{real}{imaginary:+d}i"
