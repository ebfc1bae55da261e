"""Log-probabilities of a batch's responses under a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

from trinity_events.weights.slices import find_chunk

from ..algorithms.batch import Batch
from ..algorithms.logits import (
    WHOLE,
    TokenStatistics,
    VocabularyPart,
    head_statistics,
    token_statistics,
)
from ..runtime.collectives import all_reduced
from .pretrained import FusedLossRefused


def response_statistics(
    model: nn.Module,
    batch: Batch,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    fused: bool = False,
    group: dist.ProcessGroup | None = None,
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
        group: Ranks with the same batch, which share the work of the head: each computes the
            statistics of its part of the columns, and gets all of them. Collective, backward too:
            the gradients of all ranks add up.

    Raises:
        BadPolicy: if they are fused, and the model has no linear head at its end.
    """
    own = _own_columns(batch.response_width, group)
    compute = _statistics_of_head if fused else _statistics_of_output
    statistics = compute(model, batch, own, temperature, entropy=entropy)
    if group is not None:
        statistics = _gathered(statistics, own, batch, group)
    return statistics.masked(batch.response_mask)


def statistics_of_logits(
    logits: Tensor, batch: Batch, temperature: float = 1.0, *, entropy: bool = False
) -> TokenStatistics:
    """Return :func:`response_statistics` from the result of :func:`response_logits`."""
    statistics = token_statistics(logits, batch.responses, temperature=temperature, entropy=entropy)
    return statistics.masked(batch.response_mask)


def response_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits [B, R, V] that predict response tokens, with gradient."""
    # (B, R, V). The last column predicts a token after the response.
    return _output_of_responses(model, batch, slice(0, batch.response_width))[:, :-1]


def response_logprobs(
    model: nn.Module,
    batch: Batch,
    temperature: float = 1.0,
    *,
    fused: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return log-probabilities of response tokens, as :func:`response_statistics`."""
    return response_statistics(model, batch, temperature, fused=fused, group=group).logprobs


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let calls of the module run another function in the block; its hooks stay in force."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _output_of_responses(model: nn.Module, batch: Batch, columns: slice) -> Tensor:
    """Return what the model's head makes of the columns before these response columns.

    Behind those of a whole response, there is that of its last column.
    """
    is_whole = columns == slice(0, batch.response_width)
    # The column before a token predicts it; the head is spared the prompt's. By their number, the
    # model takes the last columns as a view.
    before = torch.arange(columns.start, columns.stop) + batch.prompt_width - 1
    output: Any = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        logits_to_keep=batch.response_width + 1 if is_whole else before.to(batch.input_ids.device),
        use_cache=False,
    )
    logits: Tensor = output.logits
    return logits


def _statistics_of_output(
    model: nn.Module, batch: Batch, columns: slice, temperature: float, *, entropy: bool
) -> TokenStatistics:
    """Return statistics of the logits of these response columns."""
    tokens = batch.responses[:, columns]
    logits = _output_of_responses(model, batch, columns)[:, : tokens.shape[1]]
    return token_statistics(logits, tokens, temperature=temperature, entropy=entropy)


def _statistics_of_head(
    model: Any, batch: Batch, columns: slice, temperature: float, *, entropy: bool
) -> TokenStatistics:
    """Return statistics that the model's head computes in the place of logits."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise FusedLossRefused("head", type(head).__name__)
    tokens = batch.responses[:, columns]
    made: list[Tensor] = []

    def statistics(hidden: Tensor) -> Tensor:
        hidden, weight, bias, part = _local_head(hidden, head)
        of_head = head_statistics(
            hidden[:, : tokens.shape[1]],  # without the column after a whole response
            (weight, bias),
            tokens,
            temperature=temperature,
            entropy=entropy,
            part=part,
        )
        made.append(of_head.stacked())
        return made[0]

    # Inside the forward pass of the model, where FSDP has gathered the head's weight.
    with forward_replaced(head, statistics):
        output = _output_of_responses(model, batch, columns)
    # A model that changes its head's output, as Gemma 2 caps logits, would train on other numbers.
    if not made or output is not made[0]:
        raise FusedLossRefused("logits")
    return TokenStatistics.from_stacked(output)


def _local_head(
    hidden: Tensor, head: nn.Linear
) -> tuple[Tensor, Tensor, Tensor | None, VocabularyPart]:
    """Return hidden states, and what this rank has of the head's weight and bias."""
    weight, bias = head.weight, head.bias
    if not isinstance(hidden, DTensor) or not isinstance(weight, DTensor):
        return hidden, weight, bias, WHOLE
    mesh = weight.device_mesh
    group = mesh.get_group()
    part = VocabularyPart(
        first=find_chunk(weight.shape[0], mesh.size(), mesh.get_local_rank())[0],
        largest=partial(all_reduced, group=group, op=dist.ReduceOp.MAX),
        total=partial(all_reduced, group=group),
    )
    # Each rank has a part of the gradient of the hidden states: backward adds them up.
    whole = hidden.to_local(grad_placements=[Partial()])
    local_bias = bias.to_local() if isinstance(bias, DTensor) else bias
    return whole, weight.to_local(), local_bias, part


def _own_columns(width: int, group: dist.ProcessGroup | None) -> slice:
    """Return the part of so many response columns whose statistics this rank computes."""
    if group is None:
        return slice(0, width)
    size = -(-width // group.size())
    start = min(group.rank() * size, width)  # a rank may have none
    return slice(start, min(start + size, width))


def _gathered(
    statistics: TokenStatistics, own: slice, batch: Batch, group: dist.ProcessGroup
) -> TokenStatistics:
    """Return the statistics [B, R] of all ranks' columns. Collective, backward too."""
    values = statistics.stacked()  # (B, r, X)
    after = batch.response_width - own.stop
    whole = functional.pad(values, (0, 0, own.start, after))
    add_up: Any = all_reduce  # it has no annotations
    return TokenStatistics.from_stacked(add_up(whole, group=group))
