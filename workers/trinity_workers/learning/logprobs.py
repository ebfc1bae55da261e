"""Log-probabilities of a batch's responses under a Hugging Face model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..algorithms.batch import Batch
from ..algorithms.logits import TokenStatistics, token_statistics


def response_statistics(
    model: nn.Module, batch: Batch, temperature: float = 1.0, *, entropy: bool = False
) -> TokenStatistics:
    """Return log-probabilities of response tokens, and entropies if asked for.

    They are [B, R] float32 with gradient, 0 on padding. `temperature` must be the one that
    sampled, or the policy that is trained is not the one that acted.
    """
    # The column before a token predicts it, so R + 1 columns; the head is spared the prompt's.
    output: Any = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        logits_to_keep=batch.response_width + 1,
        use_cache=False,
    )
    logprobs, entropies = token_statistics(
        output.logits[:, :-1], batch.responses, temperature=temperature, entropy=entropy
    )
    masked = ~batch.response_mask
    return TokenStatistics(
        logprobs.masked_fill(masked, 0.0),
        None if entropies is None else entropies.masked_fill(masked, 0.0),
    )


def response_logprobs(model: nn.Module, batch: Batch, temperature: float = 1.0) -> Tensor:
    """Return log-probabilities of response tokens, as :func:`response_statistics`."""
    return response_statistics(model, batch, temperature).logprobs
