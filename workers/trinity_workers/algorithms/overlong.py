"""Penalty of responses that come near their limit of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import Batch
from .errors import AlgorithmError
from .settings import OverlongConfig


def overlong_penalty(batch: Batch, config: OverlongConfig) -> Tensor:
    """Return the penalty of each response, which is added to its reward: [B] float32, at most 0.

    Source: DAPO (arXiv 2503.14476) eq. 13, with L the limit and C = `buffer` times L: 0 up to L - C
    tokens, then (L - C - |y|) / C, and -1 beyond L; times `penalty`.

    |y| counts the policy's tokens.
    """
    length = batch.response_mask.sum(dim=-1).float()
    if not config.buffer:
        return torch.zeros_like(length)
    if config.limit is None:
        raise AlgorithmError("overlong.buffer is a share of a limit: set overlong.limit")
    buffer = config.buffer * config.limit
    return config.penalty * ((config.limit - buffer - length) / buffer).clamp(-1.0, 0.0)
