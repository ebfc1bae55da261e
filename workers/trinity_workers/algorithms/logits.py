"""Log-probabilities and entropies from logits, chunk by chunk, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK = 1024
"""Tokens whose float32 distribution is held at once, forward and backward."""
LEAST = -100.0
"""Log-probability in nats that stands for less: that of a forbidden token is -inf, and 0 times
infinity is NaN."""


class TokenStatistics(NamedTuple):
    """Log-probabilities of tokens, and entropies of their distributions if asked for."""

    logprobs: Tensor
    entropy: Tensor | None


def token_statistics(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk: int = CHUNK,
) -> TokenStatistics:
    """Return log-probabilities, and entropies H = -sum_v p_v log p_v in nats.

    The float32 distribution of a chunk alone is held at once: in the backward pass it is computed
    again.

    Args:
        logits: [B, R, V] of any floating dtype; the column that predicts each token.
        tokens: [B, R] int64.
        temperature: Temperature that sampled; logits are divided by it.
        entropy: Compute entropies too.
        chunk: Tokens of a chunk.

    Returns:
        [B, R] float32 (float64 for logits of float64), with gradient.
    """

    def part(logits: Tensor, tokens: Tensor) -> Tensor:
        logs = (exact(logits) / temperature).log_softmax(dim=-1)
        chosen = logs.gather(-1, tokens[:, None]).squeeze(-1)
        if not entropy:
            return chosen[None]
        bounded = logs.clamp(min=LEAST)
        return torch.stack([chosen, -(bounded.exp() * bounded).sum(dim=-1)])

    found = in_chunks(part, logits.flatten(0, -2), tokens.flatten(), chunk=chunk)
    return TokenStatistics(
        found[0].view(tokens.shape), found[1].view(tokens.shape) if entropy else None
    )


def exact(logits: Tensor) -> Tensor:
    """Return logits as float32; those of float64 as they are."""
    return logits if logits.dtype == torch.float64 else logits.float()


def in_chunks(function: Callable[..., Tensor], *rows: Tensor, chunk: int) -> Tensor:
    """Apply a function to rows, chunk by chunk; its results [..., n] are joined at the end."""

    def kept_small(*parts: Tensor) -> Tensor:
        found = checkpoint(function, *parts, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(found, Tensor)
        return found

    pieces = zip(*(torch.split(one, chunk) for one in rows), strict=True)
    return torch.cat([kept_small(*piece) for piece in pieces], dim=-1)
