"""Sums and counts that add up over parts of a batch, so that every rank divides by the whole's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import LengthMissing
from .settings import AlgorithmConfig
from .types import Reduce


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of values where the mask is true; others may be NaN, and get gradient 0."""
    # Not values * mask: NaN times 0 is NaN, in gradients too (decision 23).
    return values.masked_fill(~mask, 0.0).sum()


def loss_sum(losses: Tensor, mask: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return the numerator of the mean that the loss is.

    =========================== ================================ ==========================
    normalisation               numerator                        denominator
    =========================== ================================ ==========================
    `token-mean`                sum_i sum_t l_it                 sum_i |y_i|
    `sequence-mean`             sum_i (1 / |y_i|) sum_t l_it     number of responses
    `sequence-mean-token-sum`   sum_i sum_t l_it                 number of responses
    `constant`                  sum_i sum_t l_it                 number of responses times L
    =========================== ================================ ==========================

    |y_i| counts the tokens of row i that are trained on. Rows without one count for nothing.
    Sources: DAPO (arXiv 2503.14476) eq. 8; GRPO (2402.03300) eq. 3; RLOO (2402.14740), which
    takes a response for one action; Dr. GRPO (2503.20783) section 3.2, where L is the limit of
    tokens.

    Args:
        losses: [B, R] float32.
        mask: [B, R] bool.
        config: The settings, of which `normalisation` counts.

    Returns:
        0-dimensional, of the losses' dtype.
    """
    if config.normalisation == "sequence-mean":
        losses = losses / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return masked_sum(losses, mask)


def loss_denominator(mask: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return the denominator of the mean that the loss is: 0-dimensional float64.

    It is of these rows: sum it over all parts of a step, micro-batches and ranks alike.
    """
    if config.normalisation == "token-mean":
        return mask.sum().double()
    responses = mask.any(dim=-1).sum().double()
    if config.normalisation != "constant":
        return responses
    if config.normalisation_length is None:
        raise LengthMissing("normalisation_length")
    return responses * config.normalisation_length


@dataclass(frozen=True, slots=True)
class Means:
    """Named means as sums and counts: those of parts add up to those of the whole."""

    names: tuple[str, ...]
    sums: Tensor
    """[2, M] float64: sums, and counts."""

    @classmethod
    def from_tokens(cls, values: Mapping[str, Tensor], mask: Tensor) -> Means:
        """Return the means of values [B, R] where the mask is true."""
        count = mask.sum().double()
        sums = [masked_sum(tensor.detach().double(), mask) for tensor in values.values()]
        return cls._made(values, sums, count, mask)

    @classmethod
    def from_rows(cls, values: Mapping[str, Tensor], rows: Tensor) -> Means:
        """Return the means of values [B] over these rows, [B] bool."""
        return cls.from_tokens(
            {name: tensor[:, None] for name, tensor in values.items()}, rows[:, None]
        )

    @classmethod
    def _made(
        cls, names: Mapping[str, Tensor], sums: list[Tensor], count: Tensor, like: Tensor
    ) -> Means:
        # float64, so that the means do not depend on how a batch was divided (decision 23).
        counted = torch.zeros(2, len(sums), dtype=torch.float64, device=like.device)
        if sums:
            counted[0] = torch.stack(sums)
            counted[1] = count
        return cls(tuple(names), counted)

    @classmethod
    def from_total(cls, name: str, total: Tensor, *, shown: bool) -> Means:
        """Return a sum over all parts, as a mean over one thing.

        Args:
            name: Its name.
            total: 0-dimensional, this part's share of the sum.
            shown: Pass True for exactly one part, such as rank 0.
        """
        counted = torch.stack([total.double(), torch.full_like(total, shown, dtype=torch.float64)])
        return cls((name,), counted[:, None])

    def __add__(self, other: Means) -> Means:
        """Return the means of both parts: of the same names, or of others."""
        if self.names == other.names:
            return Means(self.names, self.sums + other.sums)
        if set(self.names) & set(other.names):
            raise ValueError("means of other names that overlap cannot be added")
        return Means(self.names + other.names, torch.cat([self.sums, other.sums], dim=1))

    def prefixed(self, prefix: str) -> Means:
        """Return the means with a prefix before each name."""
        return Means(tuple(prefix + name for name in self.names), self.sums)

    def reduced(self, reduce: Reduce) -> Means:
        """Return the means over all ranks. Every rank must call it, with the same names."""
        return Means(self.names, reduce(self.sums))

    def values(self) -> dict[str, float]:
        """Return the means by name; 0 where nothing was counted."""
        means = self.sums[0] / self.sums[1].clamp(min=1.0)
        return dict(zip(self.names, means.tolist(), strict=True))
