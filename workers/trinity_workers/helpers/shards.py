"""Shards of a model that each rank is to publish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.tensor import DTensor, Shard

from trinity_events.errors import TrinityError
from trinity_events.weights.compatibility import plain_name
from trinity_events.weights.slices import ShardOffset, chunk_of

from ..engines.base import LocalShard
from ..engines.buffers import saved_buffers
from ..runtime.collectives import gather_bytes, rank_and_world, together

_KEY_BYTES = 8
_INSTEAD = "upload with strategy=PublishFull()"


class ShardsRefused(TrinityError):
    """Raised if the ranks' shards of the model cannot be published in their layout."""


def fsdp_shards(
    module: Any, dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
) -> Iterator[LocalShard]:
    """Yield the shards that this rank publishes of an FSDP2 model.

    What several ranks hold alike is left to one of them: in a mesh the first along each replicated
    dimension; of what is not in a mesh at all, the ranks take turns.

    Args:
        module: The model.
        dtypes: Data types to publish parameters in, by name; by default their own.

    Raises:
        ShardsRefused: for FSDP1, whose flat parameters are no shards of tensors, for models with
            adapters, whose parameters are not the model's, and for layouts other than even chunks
            and replicas.
    """
    if any(
        type(submodule).__name__ == "FullyShardedDataParallel" for submodule in module.modules()
    ):
        raise ShardsRefused(
            f"FSDP1 keeps flat parameters, which are no shards of tensors: {_INSTEAD}"
        )
    if hasattr(module, "peft_config"):
        raise ShardsRefused(
            "the model has adapters (PEFT), which an engine merges, or leaves out, as it gathers: "
            f"{_INSTEAD}"
        )
    rank, ranks = rank_and_world()
    named = chain(module.named_parameters(), saved_buffers(module))
    for index, (name, tensor) in enumerate(named):
        value = tensor.detach()
        if isinstance(value, DTensor):
            place = _place(name, value)
            local = value.to_local()
        else:
            place = (
                ShardOffset((0,) * value.dim(), tuple(value.shape))
                if index % ranks == rank
                else None
            )
            local = value
        if place is not None:
            local = local.to(dtypes.get(name, local.dtype))
            yield LocalShard(plain_name(name), local, place.global_shape, place.begins)


def _place(name: str, value: DTensor) -> ShardOffset | None:
    """Return the offset of the rank's shard; None if it is empty or another rank publishes it."""
    mesh, shape, begins = value.device_mesh, list(value.shape), [0] * value.dim()
    coordinate: Sequence[int] | None = mesh.get_coordinate()
    if coordinate is None:
        return None
    first = True
    for placement, parts, index in zip(value.placements, mesh.shape, coordinate, strict=True):
        first = first and index == 0
        if placement.is_replicate():
            if index:
                return None
        elif type(placement) is Shard:
            dim = placement.dim
            begin, shape[dim] = chunk_of(shape[dim], parts, index)
            begins[dim] += begin
        else:
            raise ShardsRefused(f"{name} is laid out as {placement}: {_INSTEAD}")
    if tuple(value.to_local().shape) != tuple(shape):
        raise ShardsRefused(
            f"{name} has a shard of {list(value.to_local().shape)}, where {shape} was expected: "
            f"{_INSTEAD}"
        )
    # One rank publishes a tensor without elements, so that readers know of it.
    empty = 0 in shape and (0 not in value.shape or not first)
    return None if empty else ShardOffset(tuple(begins), tuple(value.shape))


def without_replicas(shards: Iterable[LocalShard]) -> list[LocalShard]:
    """Those shards that are this rank's to publish, where ranks hold some alike. Collective.

    Each goes to one of the ranks that have it, by a digest that deals them out evenly.
    """
    with together():
        mine = list(shards)
    keys = [_key(shard) for shard in mine]
    owned_by = owners(gather_bytes(b"".join(keys)))
    return [
        shard for shard, key in zip(mine, keys, strict=True) if owned_by[key] == dist.get_rank()
    ]


def owners(everyone: Sequence[bytes]) -> dict[bytes, int]:
    """Return the rank that publishes each shard, from all ranks' keys, in rank order."""
    holders: dict[bytes, list[int]] = {}
    for rank, keys in enumerate(everyone):
        for begin in range(0, len(keys), _KEY_BYTES):
            holders.setdefault(keys[begin : begin + _KEY_BYTES], []).append(rank)
    return {key: ranks[int.from_bytes(key, "big") % len(ranks)] for key, ranks in holders.items()}


def _key(shard: LocalShard) -> bytes:
    description = repr((shard.name, shard.global_shape, shard.offsets, tuple(shard.tensor.shape)))
    return xxhash.xxh3_64_digest(description.encode())
