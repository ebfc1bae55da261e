"""Log-probabilities and gradients of a model that may be distributed over a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ...algorithms.batch import Batch
from ...algorithms.logits import TokenStatistics, exact, token_statistics
from .cpu import adapted

LossFunction: TypeAlias = Callable[[TokenStatistics, Batch], tuple[Tensor, Any]]
"""Returns loss (0-dim) and metrics of a micro-batch from its log-probabilities [B, R], and from
entropies if they were asked for."""


def response_logprobs(
    chunks: Sequence[Any], parts: Sequence[Batch], *, vocabulary: int, temperature: float
) -> list[Tensor]:
    """Return log-probabilities [B, R] of every micro-batch; empty before the last stage."""

    def finish(logits: Tensor, row: _Rows) -> tuple[Tensor, Tensor]:
        found = _statistics(logits, row, vocabulary, temperature).logprobs
        return found.sum(), found

    with torch.no_grad():
        return _run_schedule(chunks, parts, finish, forward_only=True)


def accumulate_gradients(
    chunks: Sequence[Any],
    parts: Sequence[Batch],
    loss: LossFunction,
    *,
    vocabulary: int,
    temperature: float,
    entropy: bool = False,
) -> list[Any]:
    """Accumulate the gradients of the micro-batches' losses; their mean over replicas.

    Returns:
        The loss's metrics of every micro-batch on the last pipeline stage; else nothing.
    """

    def finish(logits: Tensor, row: _Rows) -> tuple[Tensor, Any]:
        found = _statistics(logits, row, vocabulary, temperature, entropy=entropy)
        value, metrics = loss(found, row.batch)
        # The schedule divides by the number of micro-batches, as if losses were means.
        return value * len(parts), metrics

    return _run_schedule(chunks, parts, finish, forward_only=False)


def response_values(chunks: Sequence[Any], parts: Sequence[Batch]) -> list[Tensor]:
    """Return values [B, R] before response tokens of every micro-batch, as log-probabilities."""

    def finish(outputs: Tensor, row: _Rows) -> tuple[Tensor, Tensor]:
        values = _values(outputs, row)
        return values.sum(), values

    with torch.no_grad():
        return _run_schedule(chunks, parts, finish, forward_only=True)


def accumulate_value_gradients(
    chunks: Sequence[Any], parts: Sequence[Batch], loss: Callable[[Tensor, Batch], Any]
) -> list[Any]:
    """Accumulate gradients as :func:`accumulate_gradients`, of losses of values [B, R]."""

    def finish(outputs: Tensor, row: _Rows) -> tuple[Tensor, Any]:
        value, metrics = loss(_values(outputs, row), row.batch)
        return value * len(parts), metrics

    return _run_schedule(chunks, parts, finish, forward_only=False)


def last_values(chunks: Sequence[Any], parts: Sequence[Batch]) -> list[Tensor]:
    """Return the output at each row's last token: [B] of every micro-batch."""

    def finish(outputs: Tensor, row: _Rows) -> tuple[Tensor, Tensor]:
        last = (row.batch.attention_mask.sum(dim=1) - 1).clamp(min=0)
        values = exact(outputs[..., 0].gather(1, last[:, None]).squeeze(1))
        return values.sum(), values

    with torch.no_grad():
        return _run_schedule(chunks, parts, finish, forward_only=True)


def whole_logits(chunks: Sequence[Any], parts: Sequence[Batch], *, vocabulary: int) -> list[Tensor]:
    """Return logits [B, S, vocabulary] of every micro-batch; empty before the last stage."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    def finish(logits: Tensor, row: _Rows) -> tuple[Tensor, Tensor]:
        whole: Tensor = gather_from_tensor_model_parallel_region(logits)[..., :vocabulary]
        return whole.sum(), whole

    with torch.no_grad():
        return _run_schedule(chunks, parts, finish, forward_only=True)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Micro-batch whose rows are shifted so that they begin with their first real token.

    Padding is then on the right only, where a causal mask hides it from every token that counts. So
    no other mask is needed, which fused attention does not support.

    tokens: [B, S] int64, shifted. firsts: [B] int64, the shift of each row.
    """

    batch: Batch
    tokens: Tensor
    firsts: Tensor

    @classmethod
    def of(cls, batch: Batch) -> _Rows:
        columns = batch.input_ids.shape[1]
        firsts = batch.attention_mask.argmax(dim=1)
        moved = torch.arange(columns, device=firsts.device)[None] + firsts[:, None]
        return cls(batch, batch.input_ids.gather(1, moved % columns), firsts)

    @property
    def before_responses(self) -> Tensor:
        """Shifted columns that predict the response tokens: [B, R] int64."""
        columns, width = self.tokens.shape[1], self.batch.response_width
        # The column before a token predicts the token.
        before = columns - width - 1 + torch.arange(width, device=self.tokens.device)
        return (before[None] - self.firsts[:, None]) % columns


def _run_schedule(
    chunks: Sequence[Any],
    parts: Sequence[Batch],
    finish: Callable[[Tensor, _Rows], tuple[Tensor, Any]],
    *,
    forward_only: bool,
) -> list[Any]:
    """Run megatron-core's schedule for the current layout over equal micro-batches.

    Args:
        chunks: This rank's chunks.
        parts: The micro-batches, the same on all ranks of one replica.
        finish: Returns, from logits [B, S, vocabulary / tensor-parallel ranks], the value to
            differentiate (0-dim) and the result.
        forward_only: If True, nothing is differentiated.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        row = _Rows.of(next(batches))
        positions = torch.arange(row.tokens.shape[1], device=row.tokens.device)
        output = model(row.tokens, positions.expand_as(row.tokens), None)
        return output, lambda logits: finish(logits, row)

    rows, columns = parts[0].input_ids.shape
    one = len(chunks) == 1
    with adapted():
        found: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(parts) if one else [iter(parts) for _ in chunks],
            model=chunks[0] if one else list(chunks),
            num_microbatches=len(parts),
            seq_length=columns,
            micro_batch_size=rows,
            forward_only=forward_only,
        )
    return found


def _statistics(
    logits: Tensor, row: _Rows, vocabulary: int, temperature: float, *, entropy: bool = False
) -> TokenStatistics:
    """Return log-probabilities [B, R] of response tokens, 0 on padding, from split logits.

    Entropies need logits that are not split.
    """
    from megatron.core import parallel_state as state
    from megatron.core import tensor_parallel

    columns, places = row.tokens.shape[1], row.before_responses
    mine = logits.shape[-1]
    logits = logits.gather(1, places[..., None].expand(-1, -1, mine))
    answers = row.tokens.gather(1, (places + 1) % columns)
    masked = ~row.batch.response_mask
    if entropy:
        found = token_statistics(
            logits[..., :vocabulary], answers, temperature=temperature, entropy=True
        )
        return TokenStatistics(*(one.masked_fill(masked, 0.0) for one in found if one is not None))
    logits = logits.float() / temperature
    real = vocabulary - mine * state.get_tensor_model_parallel_rank()
    if real < mine:  # the last columns are padding of the vocabulary
        real = max(0, real)
        logits = F.pad(logits[..., :real], (0, mine - real), value=-1e9)
    logprobs: Tensor = -tensor_parallel.vocab_parallel_cross_entropy(logits, answers)
    return TokenStatistics(logprobs.masked_fill(masked, 0.0), None)


def _values(outputs: Tensor, row: _Rows) -> Tensor:
    """Return the value before each response token [B, R], 0 on padding, from a head's outputs."""
    values = exact(outputs[..., 0].gather(1, row.before_responses))
    return values.masked_fill(~row.batch.response_mask, 0.0)
