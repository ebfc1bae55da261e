"""Division of a step's batch into updates, and of an update into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..algorithms.aggregation import Means, loss_denominator
from ..algorithms.batch import Batch
from ..algorithms.settings import AlgorithmConfig
from ..collectives import largest


class BatchDivision(NamedTuple):
    """Numbers of parts, equal on all ranks: each takes part in every forward pass of the others."""

    rows: int
    """Rows of the rank that has most."""
    epochs: int = 1
    """Passes over the batch."""
    mini_batches: int = 1
    """Updates of one pass."""
    micro_batch_rows: int | None = None
    """Maximum rows of one forward pass; None for all."""

    @property
    def parts_of_pass(self) -> int:
        """Return the micro-batches of a pass over the whole batch."""
        return self._micro_batches(self.rows)

    @property
    def parts_of_update(self) -> int:
        """Return the micro-batches of an update."""
        return self._micro_batches(_share(self.rows, self.mini_batches))

    def updates(self) -> Iterator[int]:
        """Yield the mini-batch of each update by its index, in order."""
        for _ in range(self.epochs):
            yield from range(self.mini_batches)

    def _micro_batches(self, rows: int) -> int:
        return _share(rows, self.micro_batch_rows) if self.micro_batch_rows else 1


def division_of(
    batch: Batch, settings: AlgorithmConfig, micro_batch_rows: int | None
) -> BatchDivision:
    """Return the division of a step on which this rank has this batch. Collective."""
    rows = largest(len(batch)) if micro_batch_rows else len(batch)
    return BatchDivision(rows, settings.epochs, settings.mini_batches, micro_batch_rows)


def loss_denominators(mini_batches: Sequence[Batch], settings: AlgorithmConfig) -> Tensor:
    """Return the denominator of each mini-batch's loss on this rank: [M] float64."""
    return torch.stack([loss_denominator(one.response_mask, settings) for one in mini_batches])


def response_tokens(batch: Batch, *, shown: bool) -> Means:
    """Return the number of tokens that are trained on, as a metric.

    Pass ``shown`` as True on exactly one of the ranks whose batches differ.
    """
    return Means.of_total("response_tokens", batch.response_mask.sum(), shown=shown)


def _share(rows: int, parts: int) -> int:
    return -(-rows // parts)
