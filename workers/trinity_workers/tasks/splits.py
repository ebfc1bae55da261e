"""Splits of questions: each question belongs to one of them for ever.

A hash of its text decides: what is held out is never trained on, whatever the seed, the process or
the Python version.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from .base import Question

Split = Literal["held-out", "validation", "training"]

_BUCKETS = 20
_HELD_OUT_BUCKETS = 2
"""A tenth of the questions is held out."""
_VALIDATION_BUCKETS = 1
"""A twentieth is for validation: to decide when to stop the warm-up, for instance."""


def split_of(prompt: str) -> Split:
    """Return the split of a question.

    Upper and lower case are folded together, since verifiers ignore case: "Abe" in training would
    give away a held-out "abe".
    """
    # By the text alone: a question keeps its split when others are added or removed.
    digest = hashlib.sha256(prompt.casefold().encode()).digest()
    bucket = int.from_bytes(digest[:8], "big") % _BUCKETS
    if bucket < _HELD_OUT_BUCKETS:
        return "held-out"
    if bucket < _HELD_OUT_BUCKETS + _VALIDATION_BUCKETS:
        return "validation"
    return "training"


def prompt_text(question: Question) -> str:
    """Return the prompt as text, by which its split is decided."""
    if isinstance(question.prompt, str):
        return question.prompt
    return msgspec.json.encode(question.prompt, order="deterministic").decode()
