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
    return statistics_of_logits(response_logits(model, batch), batch, temperature, entropy=entropy)


def statistics_of_logits(
    logits: Tensor, batch: Batch, temperature: float = 1.0, *, entropy: bool = False
) -> TokenStatistics:
    """Return :func:`response_statistics` from the result of :func:`response_logits`."""
    logprobs, entropies = token_statistics(
        logits, batch.responses, temperature=temperature, entropy=entropy
    )
    masked = ~batch.response_mask
    return TokenStatistics(
        logprobs.masked_fill(masked, 0.0),
        None if entropies is None else entropies.masked_fill(masked, 0.0),
    )


def response_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits [B, R, V] that predict response tokens, with gradient."""
    # The column before a token predicts it, so R + 1 columns; the head is spared the prompt's.
    output: Any = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        logits_to_keep=batch.response_width + 1,
        use_cache=False,
    )
    logits: Tensor = output.logits[:, :-1]
    return logits


def response_logprobs(model: nn.Module, batch: Batch, temperature: float = 1.0) -> Tensor:
    """Return log-probabilities of response tokens, as :func:`response_statistics`."""
    return response_statistics(model, batch, temperature).logprobs
