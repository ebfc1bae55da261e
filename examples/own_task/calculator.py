"""A tool for episodes with several turns: works out what the policy writes as `calc(6 * 7)`."""

import ast
import operator
import re
from typing import Any

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def value(node: ast.expr) -> float:
    """Return the value of an expression of numbers, and refuse anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    raise ValueError("only + - * / and numbers are known")


class Calculator:
    """Environment: replies to a call, and ends the episode when there is none."""

    def reply(self, question: Any, messages: list[dict[str, Any]]) -> str | None:
        """Return the result of the call in the policy's last turn; None if it made none."""
        call = re.search(r"calc\(([^()]*)\)", messages[-1]["content"])
        if call is None:
            return None
        try:
            return str(value(ast.parse(call[1].strip(), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError, OverflowError) as error:
            return f"error: {error}"
