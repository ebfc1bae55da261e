"""Divergence of a student's distributions from a teacher's, from the logits of both."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from .logits import CHUNK, LEAST, exact, in_chunks

Direction = Literal["forward", "reverse", "jensen-shannon"]


def token_divergence(
    student: Tensor,
    teacher: Tensor,
    direction: Direction = "reverse",
    *,
    mixture: float = 0.5,
    temperature: float = 1.0,
    chunk: int = CHUNK,
) -> Tensor:
    """Return the divergence of the distributions at each token: [B, R] float32, with gradient.

    Source: GKD (arXiv 2306.13649) section 2, P the teacher's distribution, Q the
    student's, M = b P + (1 - b) Q:

    * `forward`: KL(P || Q) = sum_v P log(P/Q). It covers the teacher.
    * `reverse`: KL(Q || P) = sum_v Q log(Q/P). It seeks the teacher's modes.
    * `jensen-shannon`: b KL(P || M) + (1 - b) KL(Q || M).

    On the student's own samples this is on-policy distillation. The teacher gets no gradient.

    Args:
        student: [B, R, V] logits.
        teacher: [B, R, V] logits.
        direction: Name of the divergence.
        mixture: b, above 0 and below 1.
        temperature: Both logits are divided by it.
        chunk: Tokens whose distributions are held at once.
    """
    if not 0.0 < mixture < 1.0:
        raise ValueError(f"the mixture of jensen-shannon is between 0 and 1, not {mixture}")

    def part(student: Tensor, teacher: Tensor) -> Tensor:
        q = (exact(student) / temperature).log_softmax(dim=-1).clamp(min=LEAST)
        p = (exact(teacher.detach()) / temperature).log_softmax(dim=-1).clamp(min=LEAST)
        if direction == "forward":
            return _kl(p, q)
        if direction == "reverse":
            return _kl(q, p)
        # In logarithms, since both probabilities may be too small for float32.
        m = torch.logaddexp(p + math.log(mixture), q + math.log1p(-mixture))
        return mixture * _kl(p, m) + (1.0 - mixture) * _kl(q, m)

    rows = student.flatten(0, -2), teacher.flatten(0, -2)  # (tokens, V) each
    return in_chunks(part, *rows, chunk=chunk).view(student.shape[:-1])


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) of log-distributions [N, V]: [N]."""
    return (p.exp() * (p - q)).sum(dim=-1)
