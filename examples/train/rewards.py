"""Rewards that examples name."""

from __future__ import annotations

from typing import Any


def in_place(question: Any, answer: Any) -> dict[str, float]:
    """Return 1 for the right text; beside it, the share of characters in their place."""
    if not answer.finished:
        return {"reward": 0.0, "score": 0.0}
    right = str(question.answer)
    same = sum(a == b for a, b in zip(answer.text, right, strict=False))
    share = same / max(len(answer.text), len(right))
    return {"reward": float(share == 1.0), "score": share}
