"""Log-probabilities and gradients of a model that may be distributed over a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ...algorithms.batch import Batch
from ...algorithms.logits import (
    TokenStatistics,
    VocabularyPart,
    exact,
    head_statistics,
    token_statistics,
)
from ...learning.finite import with_backward_gradient
from ...learning.logprobs import forward_replaced
from ...runtime.collectives import all_reduced
from ..context_parallel import SequenceShare
from .cpu import adapted

LossFunction: TypeAlias = Callable[[TokenStatistics, Batch], tuple[Tensor, Any]]
"""Returns loss (0-dim) and metrics of a micro-batch from its log-probabilities [B, R], and from
entropies if they were asked for."""


class Statistics(NamedTuple):
    """Computation of statistics of response tokens from a model's last hidden states."""

    vocabulary: int
    """Tokens; the columns after them are padding."""
    temperature: float
    entropy: bool = False
    fused: bool = False
    """If True, the logits of a chunk of tokens alone are in memory at once."""


def response_logprobs(
    chunks: Sequence[Any], parts: Sequence[Batch], statistics: Statistics
) -> list[Tensor]:
    """Return log-probabilities [B, R] of every micro-batch; empty before the last stage."""

    def finish(output: Tensor, row: _Rows) -> tuple[Tensor, Tensor]:
        logprobs = row.statistics(output, statistics).logprobs
        return logprobs.sum(), logprobs

    with torch.no_grad():
        return _run_schedule(chunks, parts, finish, forward_only=True, head=_make_head(statistics))


def accumulate_gradients(
    chunks: Sequence[Any],
    parts: Sequence[Batch],
    loss: LossFunction,
    statistics: Statistics,
) -> list[Any]:
    """Accumulate the gradients of the micro-batches' losses; their mean over replicas.

    Returns:
        The loss's metrics of every micro-batch on the last pipeline stage; else nothing.
    """

    def finish(output: Tensor, row: _Rows) -> tuple[Tensor, Any]:
        value, metrics = loss(row.statistics(output, statistics), row.batch)
        # The schedule divides by the number of micro-batches, as if losses were means.
        return with_backward_gradient(value) * len(parts), metrics

    return _run_schedule(chunks, parts, finish, forward_only=False, head=_make_head(statistics))


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
        # As above: the schedule divides by this number.
        return with_backward_gradient(value) * len(parts), metrics

    return _run_schedule(chunks, parts, finish, forward_only=False)


def last_values(chunks: Sequence[Any], parts: Sequence[Batch]) -> list[Tensor]:
    """Return the output at each row's last token: [B] of every micro-batch."""

    def finish(outputs: Tensor, row: _Rows) -> tuple[Tensor, Tensor]:
        # (B,). Shifted rows have their tokens on the left, so that their number tells the last
        # column.
        last = (row.batch.attention_mask.sum(dim=1) - 1).clamp(min=0)
        values = exact(row.gather(outputs)[..., 0].gather(1, last[:, None]).squeeze(1))
        return values.sum(), values

    with torch.no_grad():
        return _run_schedule(chunks, parts, finish, forward_only=True)


def whole_logits(chunks: Sequence[Any], parts: Sequence[Batch], *, vocabulary: int) -> list[Tensor]:
    """Return logits [B, S, vocabulary] of every micro-batch; empty before the last stage."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    def finish(logits: Tensor, row: _Rows) -> tuple[Tensor, Tensor]:
        whole = row.gather(gather_from_tensor_model_parallel_region(logits))
        whole = whole[:, : row.columns, :vocabulary]
        return whole.sum(), whole

    with torch.no_grad():
        return _run_schedule(chunks, parts, finish, forward_only=True)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Micro-batch whose rows are shifted so that they begin with their first real token.

    Padding is then on the right only, where a causal mask hides it from every token that counts. So
    no other mask is needed, which fused attention does not support. There are columns of padding
    more if the ranks that share a sequence could not divide it otherwise.

    tokens: [B, S] int64, shifted. firsts: [B] int64, the shift of each row.
    """

    batch: Batch
    tokens: Tensor
    firsts: Tensor
    share: SequenceShare | None
    """This context-parallel rank's columns; None if it has all."""

    @classmethod
    def of(cls, batch: Batch, transformer: Any) -> _Rows:
        from megatron.core import parallel_state as state

        columns = batch.input_ids.shape[1]
        # (B,). argmax() returns the first of equal values, here the first token.
        firsts = batch.attention_mask.argmax(dim=1)
        moved = torch.arange(columns, device=firsts.device)[None] + firsts[:, None]
        # The remainder takes the padding of the left around to the right.
        tokens = batch.input_ids.gather(1, moved % columns)
        tokens = functional.pad(tokens, (0, _padded_columns(columns, transformer) - columns))
        share = None
        if transformer.context_parallel_size > 1:
            group = state.get_context_parallel_group()
            share = SequenceShare(tokens.shape[1], group, tokens.device)
        return cls(batch, tokens, firsts, share)

    @property
    def columns(self) -> int:
        """Columns of the batch, without those that were added for the division."""
        return self.batch.input_ids.shape[1]

    def select(self, values: Tensor) -> Tensor:
        """Return the columns [B, S / C] of this context-parallel rank from values [B, S]."""
        return values if self.share is None else self.share.select(values)

    def gather(self, values: Tensor) -> Tensor:
        """Return values [B, S, X] from those [B, S / C, X] of this rank. Collective."""
        return values if self.share is None else self.share.gather(values)

    @property
    def before_responses(self) -> Tensor:
        """Columns before those of response tokens: [B, R]. Each predicts the token after it."""
        width = self.batch.response_width
        before = self.columns - width - 1 + torch.arange(width, device=self.firsts.device)
        return (before[None] - self.firsts[:, None]) % self.columns

    @property
    def answers(self) -> Tensor:
        """Response tokens: [B, R]."""
        return self.tokens.gather(1, (self.before_responses + 1) % self.columns)

    def select_responses(self, values: Tensor) -> Tensor:
        """Return the values [B, S, X] that predict response tokens: [B, R, X]."""
        return values.gather(1, self.before_responses[..., None].expand(-1, -1, values.shape[-1]))

    def compute_statistics(
        self, output: Tensor, compute: Callable[[Tensor, Tensor], TokenStatistics]
    ) -> Tensor:
        """Return statistics [B, R, X] of response tokens. Collective.

        Each context-parallel rank computes those of its own columns. All get all of them, so that
        a loss need not be a sum over tokens.

        Args:
            output: This rank's output [B, S / C, Y].
            compute: Returns statistics [N, M] from outputs [N, M, Y] and the tokens [N, M] that
                they predict.
        """
        if self.share is None:
            return compute(self.select_responses(output), self.answers).stacked()
        predicts = torch.zeros_like(self.tokens, dtype=torch.bool)  # (B, S)
        predicts.scatter_(1, self.before_responses, self.batch.response_mask)
        own = self.share.select(predicts)
        following = self.share.select(self.tokens.roll(-1, dims=1))
        # (N, X), of the tokens of all rows that count. A rank may have none.
        statistics = compute(output[own][None], following[own][None]).stacked()[0]
        columns = statistics.new_zeros(*own.shape, statistics.shape[-1])
        columns = columns.masked_scatter(own[..., None], statistics)
        return self.select_responses(self.share.gather(columns))

    def statistics(self, output: Tensor, settings: Statistics) -> TokenStatistics:
        """Return statistics [B, R] of response tokens, 0 on padding. Collective.

        Args:
            output: Split logits [B, S / C, V / tensor-parallel ranks]; if fused, the head's result.
            settings: The computation.
        """
        if not settings.fused:
            output = self.compute_statistics(
                output,
                partial(
                    token_statistics,
                    temperature=settings.temperature,
                    entropy=settings.entropy,
                    part=_vocabulary_part(output.shape[-1], settings.vocabulary),
                ),
            )
        return TokenStatistics.from_stacked(output).masked(self.batch.response_mask)


def _padded_columns(columns: int, transformer: Any) -> int:
    """Return the number of columns, padded so that the ranks of a sequence can divide it."""
    parts = transformer.tensor_model_parallel_size if transformer.sequence_parallel else 1
    if transformer.context_parallel_size > 1:
        parts *= 2 * transformer.context_parallel_size  # each rank has two chunks
    return -(-columns // parts) * parts


_Head: TypeAlias = Callable[[_Rows, Tensor, Tensor], Tensor]
"""Returns the model's output [B, R, X] from hidden states [B, S / C, H] and the head's weight."""


def _make_head(settings: Statistics) -> _Head | None:
    """Return what computes statistics in the place of logits, if they are fused."""

    def head(row: _Rows, hidden: Tensor, weight: Tensor) -> Tensor:
        part = _vocabulary_part(weight.shape[0], settings.vocabulary)

        def compute(outputs: Tensor, tokens: Tensor) -> TokenStatistics:
            return head_statistics(
                outputs,
                (weight, None),
                tokens,
                temperature=settings.temperature,
                entropy=settings.entropy,
                part=part,
            )

        return row.compute_statistics(hidden, compute)

    return head if settings.fused else None


@contextmanager
def _with_head(model: Any, row: _Rows, head: _Head | None) -> Iterator[None]:
    """Let the model's output layer, if it has one, compute another output in the block."""
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
    )
    from megatron.core.utils import get_attr_wrapped_model

    inner = get_attr_wrapped_model(model, "post_process", return_model_obj=True)
    if head is None or not inner.post_process:
        yield
        return
    layer = inner.output_layer

    def forward(hidden: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        # The model gives, and transposes, columns first. Backward, either function adds up what
        # each tensor-parallel rank's columns of the vocabulary give for the hidden states.
        if inner.config.sequence_parallel:
            rows = gather_from_sequence_parallel_region(hidden).transpose(0, 1)
        else:
            # Not before the transposition: megatron-core's sum does not reach a gradient that is
            # not contiguous (mappings.py, _reduce).
            rows = copy_to_tensor_model_parallel_region(hidden.transpose(0, 1))
        output = head(row, rows, layer.weight if weight is None else weight)
        return output.transpose(0, 1), None

    with forward_replaced(layer, forward):
        yield


def _run_schedule(
    chunks: Sequence[Any],
    parts: Sequence[Batch],
    finish: Callable[[Tensor, _Rows], tuple[Tensor, Any]],
    *,
    forward_only: bool,
    head: _Head | None = None,
) -> list[Any]:
    """Run megatron-core's schedule for the current layout over micro-batches.

    Args:
        chunks: This rank's chunks.
        parts: The micro-batches, the same on all ranks of one replica.
        finish: Returns, from the model's output, the value to differentiate (0-dim) and the result.
            The output is logits [B, S / C, vocabulary / tensor-parallel ranks], where C is the
            number of context-parallel ranks.
        forward_only: If True, nothing is differentiated.
        head: Computes another output than logits.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    def step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        row = _Rows.of(next(batches), transformer)
        positions = torch.arange(row.tokens.shape[1], device=row.tokens.device)
        positions = positions.expand_as(row.tokens)
        with _with_head(model, row, head):
            # No attention mask: padding is on the right of all rows, see _Rows.
            output = model(row.select(row.tokens), row.select(positions), None)
        return output, lambda output: finish(output, row)

    transformer = get_model_config(chunks[0])
    rows, columns = parts[0].input_ids.shape
    # Stages send each other the shapes, where those differ.
    shapes = {part.input_ids.shape for part in parts}
    transformer.variable_seq_lengths = len(shapes) > 1
    is_single = len(chunks) == 1
    with adapted():
        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            # Each virtual stage takes every micro-batch once.
            data_iterator=iter(parts) if is_single else [iter(parts) for _ in chunks],
            model=chunks[0] if is_single else list(chunks),
            num_microbatches=len(parts),
            seq_length=_padded_columns(columns, transformer),
            micro_batch_size=rows,
            forward_only=forward_only,
        )
    return outputs


def _vocabulary_part(width: int, vocabulary: int) -> VocabularyPart:
    """Return the part of the vocabulary of this rank's logits, which have so many columns."""
    from megatron.core import parallel_state as state

    group = state.get_tensor_model_parallel_group()
    first = width * group.rank()
    # The last ranks may have nothing but padding.
    columns = min(width, max(0, vocabulary - first))
    if group.size() == 1:
        return VocabularyPart(columns=columns)
    return VocabularyPart(
        first,
        columns,
        largest=partial(all_reduced, group=group, op=dist.ReduceOp.MAX),
        total=partial(all_reduced, group=group),
    )


def _values(outputs: Tensor, row: _Rows) -> Tensor:
    """Return the value before each response token [B, R], 0 on padding, from a head's outputs."""
    values = exact(row.gather(outputs)[..., 0].gather(1, row.before_responses))
    return values.masked_fill(~row.batch.response_mask, 0.0)
