"""Slices of tensors that ranks hold, by the layout of torch's sharded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from trinity_events.weights.slices import TensorSlice, find_chunk


class HeldSlice(NamedTuple):
    """Slice of a tensor that a rank holds."""

    place: TensorSlice
    is_first: bool
    """True on the first of the ranks that hold the slice alike."""


def find_held_slice(tensor: DTensor, coordinate: Sequence[int]) -> HeldSlice | None:
    """Return the slice that the rank with this coordinate in the tensor's mesh holds.

    It is None if the tensor is laid out in another way than in even chunks and replicas.
    """
    divisions = list(zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True))
    # FSDP's dimension is the first of the mesh, and divides what tensor parallelism has divided.
    if any(isinstance(placement, _StridedShard) for placement in tensor.placements):
        divisions.reverse()
    offsets, shape, is_first = [0] * tensor.dim(), list(tensor.shape), True
    for placement, parts, index in divisions:
        if isinstance(placement, Replicate):
            is_first = is_first and index == 0
        elif isinstance(placement, Shard | _StridedShard):
            begin, shape[placement.dim] = find_chunk(shape[placement.dim], parts, index)
            offsets[placement.dim] += begin
        else:
            return None
    return HeldSlice(TensorSlice(tuple(offsets), tuple(shape)), is_first)
