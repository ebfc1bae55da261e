"""Division of a step's batch into updates, and of an update into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ...algorithms.aggregation import Means, loss_denominator
from ...algorithms.batch import Batch
from ...algorithms.partition import RowSize, least_parts, padded_size, partition, places
from ...algorithms.settings import AlgorithmConfig
from ...config.sections.trainer import TrainerConfig
from ...runtime.collectives import largest


class MicroBatchLimit(NamedTuple):
    """Maximum size of a micro-batch: by rows, by tokens, or none."""

    rows: int | None = None
    tokens: int | None = None
    """Tokens with their padding. A row with more is a micro-batch by itself."""


NO_LIMIT = MicroBatchLimit()


def micro_batch_limit(config: TrainerConfig) -> MicroBatchLimit:
    """Return the limit that the configuration sets."""
    return MicroBatchLimit(config.micro_batch_rows, config.micro_batch_tokens)


class MicroBatches(NamedTuple):
    """Micro-batches of a batch, and the way back to its rows."""

    parts: list[Batch]
    order: list[int]
    """Place of each row of the batch among the rows of all parts."""
    width: int
    """Response columns of the batch."""

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """Return values [b, r] of the parts' rows, in order and width of the batch: [B, R]."""
        wide = [functional.pad(tensor, (0, self.width - tensor.shape[1])) for tensor in values]
        return torch.cat(wide)[self.order]  # (B, R), without the padding rows


class BatchDivision(NamedTuple):
    """Division of a step's batch into parts.

    The numbers of parts are equal on all ranks: each takes part in every forward pass of the
    others.
    """

    limit: MicroBatchLimit
    epochs: int
    """Passes over the batch."""
    parts_of_pass: int
    """Micro-batches of a pass over the whole batch."""
    parts_of_updates: list[int]
    """Micro-batches of each mini-batch."""
    alike: dist.ProcessGroup | None
    """Ranks whose micro-batches must have one shape."""

    def updates(self) -> Iterator[int]:
        """Yield the mini-batch of each update by its index, in order."""
        for _ in range(self.epochs):
            yield from range(len(self.parts_of_updates))

    def for_pass(self, batch: Batch) -> MicroBatches:
        """Return the micro-batches of a pass over the whole batch."""
        return self._divided(batch, self.parts_of_pass)

    def for_update(self, mini_batch: Batch, index: int) -> MicroBatches:
        """Return the micro-batches of the mini-batch of this index."""
        return self._divided(mini_batch, self.parts_of_updates[index])

    def _divided(self, batch: Batch, count: int) -> MicroBatches:
        if self.limit.tokens is None:
            parts = batch.equal_parts(count)
            size = len(parts[0])
            rows = [
                list(range(len(batch)))[start : start + size]
                for start in range(0, count * size, size)
            ]
        else:
            sizes = row_sizes(batch)
            rows = partition(sizes, self.limit.tokens, count)
            parts = [_part(batch, chosen, sizes) for chosen in rows]
        if self.alike is not None:
            parts = _pad_to_common_shape(parts, self.alike)
        return MicroBatches(
            parts, places(rows, [len(part) for part in parts]), batch.response_width
        )


def division_of(
    batch: Batch,
    settings: AlgorithmConfig,
    limit: MicroBatchLimit,
    *,
    stages: int = 1,
    alike: dist.ProcessGroup | None = None,
) -> BatchDivision:
    """Return the division of a step on which this rank has this batch. Collective.

    Args:
        batch: Rows of this rank, or of its replica.
        settings: The algorithm.
        limit: Maximum size of a micro-batch.
        stages: Pipeline stages; each number of micro-batches is a multiple of it.
        alike: Ranks that exchange tokens in a forward pass, as experts' do: their micro-batches
            have one shape.
    """
    # The whole batch for the passes without gradients, then each mini-batch.
    wholes = [batch, *batch.equal_parts(settings.mini_batches)]
    counts = [1] * len(wholes)
    if limit.rows is not None:
        counts = largest([-(-len(whole) // limit.rows) for whole in wholes])
    if limit.tokens is not None:
        counts = largest([least_parts(row_sizes(whole), limit.tokens) for whole in wholes])
    of_pass, *of_updates = (-(-count // stages) * stages for count in counts)
    return BatchDivision(limit, settings.epochs, of_pass, of_updates, alike)


def row_sizes(batch: Batch) -> list[RowSize]:
    """Return the number of tokens of each row's prompt and response."""
    attended = batch.attention_mask
    prompts = attended[:, : batch.prompt_width].sum(dim=-1)
    # (B, 2): one copy from the GPU for all rows, where each would wait for it.
    both = torch.stack([prompts, attended.sum(dim=-1) - prompts], dim=-1)
    return [RowSize(*size) for size in both.tolist()]


def loss_denominators(mini_batches: Sequence[Batch], settings: AlgorithmConfig) -> Tensor:
    """Return the denominator of each mini-batch's loss on this rank: [M] float64."""
    return torch.stack(
        [loss_denominator(mini_batch.response_mask, settings) for mini_batch in mini_batches]
    )


def response_tokens(batch: Batch, *, shown: bool) -> Means:
    """Return the number of tokens that are trained on, as a metric.

    Pass ``shown`` as True on exactly one of the ranks whose batches differ.
    """
    return Means.from_total("response_tokens", batch.response_mask.sum(), shown=shown)


def _part(batch: Batch, rows: Sequence[int], sizes: Sequence[RowSize]) -> Batch:
    """Return these rows, as wide as they need; a padding row if there is none."""
    if not rows:
        return batch.padding_rows(1).narrowed(1, 1)
    width = padded_size([sizes[row] for row in rows])
    # A batch without response columns has no token to compute anything of.
    return batch.select(rows).narrowed(width.prompt, max(1, width.response))


def _pad_to_common_shape(parts: Sequence[Batch], group: dist.ProcessGroup) -> list[Batch]:
    """Return the parts with padding, so that all ranks of the group have its shape. Collective."""
    shapes = [(len(part), part.prompt_width, part.response_width) for part in parts]
    # One exchange for all parts: their number is the same on all ranks.
    agreed = largest([size for shape in shapes for size in shape], group)
    return [
        part.padded(agreed[3 * index]).widened(*agreed[3 * index + 1 : 3 * index + 3])
        for index, part in enumerate(parts)
    ]
