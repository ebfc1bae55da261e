"""Slices of whole parameters that one rank's shards are, as views that can be read and written.

Shards of two layouts are slices of the same parameters. A gate and an up projection that share a
parameter are two of them, since each shard has a part of the one, then a part of the other. So do
query groups lie in order within a fused projection of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from trinity_events.weights.slices import TensorSlice

from .stream import global_name, named_weights, partition_dim, shard_group

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_GATED = ".linear_fc1.weight"


class ParameterSlice(NamedTuple):
    """View of a parameter on this rank."""

    name: str
    """Name of the parameter, with layer and expert numbers of the whole model."""
    place: TensorSlice
    """Slice of the whole parameter."""
    tensor: torch.Tensor


def parameter_slices(chunk: Any, vocabulary: int) -> Iterator[ParameterSlice]:
    """Yield the slices of a chunk's parameters. Rows beyond the vocabulary are left out.

    Args:
        chunk: GPTModel of any layout, unwrapped.
        vocabulary: Rows of the embedding that are no padding.
    """
    for local_name, parameter in named_weights(chunk):
        name = global_name(local_name, chunk)
        if name == _OUTPUT and chunk.share_embeddings_and_output_weights:
            name = _EMBEDDING  # the last pipeline stage has a copy of it
        rank, dim = shard_group(name, chunk.pg_collection).rank(), partition_dim(parameter)
        for piece_name, piece in _pieces(name, parameter.detach()):
            offsets = [0] * piece.dim()
            if dim >= 0:
                offsets[dim] = rank * piece.shape[dim]
            rows = piece
            if name in (_EMBEDDING, _OUTPUT):
                rows = piece[: max(0, vocabulary - offsets[0])]
            if rows.numel():
                yield ParameterSlice(
                    piece_name, TensorSlice(tuple(offsets), tuple(rows.shape)), rows
                )


def _pieces(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if not name.endswith(_GATED):
        return [(name, tensor)]
    # Of one rank's shard: its part of the gate projection, then its part of the up projection.
    gate, up = tensor.chunk(2)
    return [(f"{name}:gate", gate), (f"{name}:up", up)]
