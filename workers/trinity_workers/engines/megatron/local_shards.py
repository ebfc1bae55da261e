"""Shards of one rank for every tensor, without communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..base import LocalShard
from .stream import global_name, partition_dim, shard_group
from .weights import local_mapping


def local_shards(
    hf: Any, config: Any, chunks: Sequence[Any], *, tied: bool
) -> Iterator[LocalShard]:
    """Yield this rank's slices. Replicas, and ranks that share a complete tensor, each yield it.

    A slice that contains only vocabulary padding is left out.
    """
    for chunk in chunks:
        for local_name, parameter in chunk.named_parameters():
            name = global_name(local_name, chunk)
            if tied and name == "output_layer.weight":
                continue
            group = shard_group(name)
            parts, dim = group.size(), partition_dim(parameter)
            mapping = local_mapping(hf, config, parts)
            for found, piece in mapping.to_huggingface(name, parameter.detach()):
                shape, offsets = list(piece.shape), [0] * piece.dim()
                if dim >= 0:
                    offsets[dim] = group.rank() * piece.shape[dim]
                    shape[dim] = parts * piece.shape[dim]
                tensor = piece
                if found.endswith(("embed_tokens.weight", "lm_head.weight")):
                    shape[0] = hf.vocab_size
                    tensor = piece[: max(0, hf.vocab_size - offsets[0])]
                if tensor.numel():
                    yield LocalShard(found, tensor, tuple(shape), tuple(offsets))
