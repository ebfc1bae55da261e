"""Causal attention in plain torch, of ranks that may each have a part of every sequence.

1. The columns of a sequence are cut into 2 C equal chunks for C context-parallel ranks. Rank r has
   the chunks r and 2 C - 1 - r, in this order, so that all ranks have equally many pairs of a query
   and an earlier key. megatron-core and Transformer Engine divide sequences alike.
2. Queries stay where they are. Keys and values of the whole sequence are gathered, and their
   gradients are summed over the ranks and given back to the rank that they are of.
3. Numbers by token are gathered as well, and all ranks compute the same loss of them. Each rank
   takes back the gradient of its own columns alone: a sum would multiply it by C.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional


class SequenceShare:
    """Columns of a sequence that this rank has: chunks r and 2 C - 1 - r of 2 C.

    Args:
        columns: Columns of the whole sequence, S: a multiple of 2 C.
        group: The C context-parallel ranks.
        device: Device of the tensors.
    """

    def __init__(self, columns: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        chunks = torch.arange(columns, device=device).view(2 * group.size(), -1)
        self.columns = chunks[own_chunks(group.rank(), group.size())].flatten()  # (S / C,)

    def select(self, values: Tensor) -> Tensor:
        """Return this rank's columns [B, S / C, ...] of values [B, S, ...]."""
        return values[:, self.columns]

    def gather(self, values: Tensor) -> Tensor:
        """Return values [B, S, ...] of all columns from this rank's [B, S / C, ...]. Collective.

        Every rank must compute the same from them: each takes back its own gradient (invariant 3).
        """
        return gather_sequence(values.transpose(0, 1), self._group).transpose(0, 1)


def gather_sequence(
    values: Tensor, group: dist.ProcessGroup, *, sum_gradients: bool = False
) -> Tensor:
    """Return the values of all columns, in their order, from those of this rank. Collective.

    Args:
        values: [S / C, ...], in the order of :class:`SequenceShare`.
        group: The C context-parallel ranks.
        sum_gradients: If True, a rank's gradient is the sum over all ranks; else its own alone. The
            backward pass is collective then.
    """
    gather: Any = _GatherSequence.apply
    gathered: Tensor = gather(values, group, sum_gradients)
    return gathered


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return attention [S / C, B, H, D] of each query to the tokens up to its own. Collective.

    One rank may have fewer queries than keys: they are the last tokens then, as while generating.

    Args:
        query: [S / C, B, H, D], in the order of :class:`SequenceShare`.
        key: [S / C, B, G, D], where H is a multiple of G.
        value: As the keys.
        group: The C context-parallel ranks.
        scale: Factor of the products; by default 1 / sqrt(D).
        dropout: Probability of an attention weight to be 0.
    """
    ranks = group.size()
    if ranks == 1:
        return _attend_to_last(query, key, value, scale, dropout)
    # One collective for both, which costs more in its start than in its bytes.
    both = gather_sequence(torch.cat([key, value], dim=-1), group, sum_gradients=True)
    key, value = torch.split(both, [key.shape[-1], value.shape[-1]], dim=-1)
    size = len(query) // 2
    ends = [size * (chunk + 1) for chunk in own_chunks(group.rank(), ranks)]
    return torch.cat(
        [
            _attend_to_last(queries, key[:end], value[:end], scale, dropout)
            for queries, end in zip(torch.split(query, size), ends, strict=True)
        ]
    )


def own_chunks(rank: int, ranks: int) -> list[int]:
    """Return the chunks of a sequence that a rank has, in their order in its tensors."""
    return [rank, 2 * ranks - 1 - rank]


def _chunks_by_rank(ranks: int) -> list[int]:
    """Return the chunks of a sequence in the order in which a gather brings them."""
    return [chunk for rank in range(ranks) for chunk in own_chunks(rank, ranks)]


def _attend_to_last(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float
) -> Tensor:
    """Return causal attention [Q, B, H, D] of queries that belong to the last Q of K keys."""
    queries, keys = len(query), len(key)
    # torch aligns its own causal mask to the first key. A single query sees every key.
    mask = None
    if 1 < queries < keys:
        mask = _last_rows_mask(queries, keys, query.device)
    attended = functional.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        attn_mask=mask,
        is_causal=queries == keys,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return attended.permute(2, 0, 1, 3)


def _last_rows_mask(queries: int, keys: int, device: torch.device) -> Any:
    """Return the last rows [Q, K] of a causal mask."""
    if device.type == "cuda":
        # It has no memory: torch's kernel for CUDA aligns its causal mask so by itself.
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup, sum_gradients: bool) -> Tensor:
        ctx.group, ctx.sum_gradients = group, sum_gradients
        ranks = group.size()
        gathered = values.new_empty(ranks * len(values), *values.shape[1:])
        dist.all_gather(list(gathered.chunk(ranks)), values.contiguous(), group=group)
        order = _chunks_by_rank(ranks)
        places = sorted(range(len(order)), key=order.__getitem__)
        return gathered.view(len(order), -1, *values.shape[1:])[places].flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        [gradient] = gradients
        group, ranks = ctx.group, ctx.group.size()
        chunks = gradient.reshape(2 * ranks, -1, *gradient.shape[1:])
        if not ctx.sum_gradients:
            return chunks[own_chunks(group.rank(), ranks)].flatten(0, 1), None, None
        by_rank = chunks[_chunks_by_rank(ranks)].flatten(0, 1)
        own = by_rank.new_empty(len(by_rank) // ranks, *by_rank.shape[1:])
        dist.reduce_scatter(own, list(by_rank.chunk(ranks)), group=group)
        return own, None, None
