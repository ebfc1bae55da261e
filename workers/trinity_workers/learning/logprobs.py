"""Log-probabilities of a batch's responses under a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..algorithms.batch import Batch
from ..algorithms.logits import TokenStatistics, head_statistics, token_statistics
from .pretrained import FusedLossRefused


def response_statistics(
    model: nn.Module,
    batch: Batch,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    fused: bool = False,
) -> TokenStatistics:
    """Return log-probabilities of response tokens, and entropies if asked for.

    They are [B, R] float32 with gradient, 0 on padding.

    Args:
        model: A causal language model.
        batch: The batch.
        temperature: The one that sampled, or the policy that is trained is not the one that acted.
        entropy: Compute entropies too.
        fused: Compute them inside the model's head, chunk by chunk, so that the logits are never
            in memory at once.

    Raises:
        BadPolicy: if they are fused, and the model has no linear head at its end.
    """
    if fused:
        statistics = _statistics_of_head(model, batch, temperature, entropy=entropy)
        return statistics.masked(batch.response_mask)
    return statistics_of_logits(response_logits(model, batch), batch, temperature, entropy=entropy)


def statistics_of_logits(
    logits: Tensor, batch: Batch, temperature: float = 1.0, *, entropy: bool = False
) -> TokenStatistics:
    """Return :func:`response_statistics` from the result of :func:`response_logits`."""
    statistics = token_statistics(logits, batch.responses, temperature=temperature, entropy=entropy)
    return statistics.masked(batch.response_mask)


def response_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits [B, R, V] that predict response tokens, with gradient."""
    # (B, R, V). The last column predicts a token after the response.
    return _output_of_responses(model, batch)[:, :-1]


def response_logprobs(
    model: nn.Module, batch: Batch, temperature: float = 1.0, *, fused: bool = False
) -> Tensor:
    """Return log-probabilities of response tokens, as :func:`response_statistics`."""
    return response_statistics(model, batch, temperature, fused=fused).logprobs


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let calls of the module run another function in the block; its hooks stay in force."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _output_of_responses(model: nn.Module, batch: Batch) -> Tensor:
    """Return what the model's head makes of the columns before response tokens, and of the last."""
    # The column before a token predicts it, so R + 1 columns; the head is spared the prompt's.
    output: Any = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        logits_to_keep=batch.response_width + 1,
        use_cache=False,
    )
    logits: Tensor = output.logits
    return logits


def _statistics_of_head(
    model: Any, batch: Batch, temperature: float, *, entropy: bool
) -> TokenStatistics:
    """Return statistics that the model's head computes in the place of logits."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise FusedLossRefused("head", type(head).__name__)
    made: list[Tensor] = []

    def statistics(hidden: Tensor) -> Tensor:
        of_head = head_statistics(
            hidden[:, :-1],
            (head.weight, head.bias),
            batch.responses,
            temperature=temperature,
            entropy=entropy,
        )
        made.append(torch.stack([tensor for tensor in of_head if tensor is not None], dim=-1))
        return made[0]

    # Inside the forward pass of the model, where FSDP has gathered the head's weight.
    with forward_replaced(head, statistics):
        output = _output_of_responses(model, batch)
    # A model that changes its head's output, as Gemma 2 caps logits, would train on other numbers.
    if not made or output is not made[0]:
        raise FusedLossRefused("logits")
    logprobs, *entropies = output.unbind(dim=-1)
    return TokenStatistics(logprobs, entropies[0] if entropies else None)
