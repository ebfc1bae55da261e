"""Publishing what each rank holds: nothing is gathered, and rank 0 sends no more than others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from logging import Logger
from typing import Any

import torch.distributed as dist
import xxhash
from torch.distributed.tensor import DTensor, Shard

from trinity_events.errors import TrinityError
from trinity_events.weights import Publication, Synchronizer
from trinity_events.weights.compatibility import plain_name
from trinity_events.weights.slices import ShardOffset, chunk_of

from ..collectives import PeerFailed, gather_bytes, rank_and_world, together
from ..engines.base import LocalShard
from ..engines.buffers import saved_buffers
from .publishing import write_shards

_KEY_BYTES = 8


class ShardsRefused(TrinityError):
    """Raised if the ranks' shards of the model cannot be published in their layout."""


def publish_shards(
    shards: Iterable[LocalShard], synchronizer: Synchronizer, global_step: int, logger: Logger
) -> None:
    """Publish every rank's shards as the version of ``global_step``. Collective.

    The version is ready once all ranks' parts are. When one rank fails, all take back what they
    wrote, then all raise; the version is never seen.

    Args:
        shards: What this rank is to publish; together the ranks' are the whole model, once.
        synchronizer: Where to; on every rank it publishes events too.
        global_step: The training step, which names the version.
        logger: Says what was published.

    Raises:
        PeerFailed: on the ranks that did not fail themselves.
        CollectiveBroken: when a rank died, or was too slow.
    """
    rank, ranks = rank_and_world()
    opens = range(ranks) if rank == 0 else None
    with synchronizer.publication(global_step, rank, ranks=opens) as part:
        with _agreed(part):
            # First: where they are refused the version may be published in full, by rank 0 alone.
            held = list(shards)
            report = write_shards(part, held)
        with _agreed(part):
            # Only now: a part in the log is whole, and so is every other.
            part.publish()
    logger.info("step %d: rank %d published %d bytes", global_step, rank, report.bytes)


@contextmanager
def _agreed(part: Publication) -> Iterator[None]:
    """Raise on all ranks when the block fails on one. Collective.

    On :class:`PeerFailed` the rank gives up its part; the failed rank's event has the reason.
    """
    try:
        with together():
            yield
    except PeerFailed:
        part.give_up()
        raise


def fsdp_shards(module: Any) -> Iterator[LocalShard]:
    """Yield the shards that this rank publishes of an FSDP2 model.

    What several ranks hold alike is left to one of them: in a mesh the first along each replicated
    dimension; of what is not in a mesh at all, the ranks take turns.

    Raises:
        ShardsRefused: for FSDP1, whose flat parameters are no shards of tensors, for models with
            adapters, whose parameters are not the model's, and for layouts other than even chunks
            and replicas.
    """
    if any(type(one).__name__ == "FullyShardedDataParallel" for one in module.modules()):
        raise ShardsRefused(
            "FSDP1 keeps flat parameters, which are no shards of tensors: upload with sharded=False"
        )
    if hasattr(module, "peft_config"):
        raise ShardsRefused(
            "the model has adapters (PEFT), which an engine merges, or leaves out, as it gathers: "
            "upload with sharded=False"
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
            raise ShardsRefused(f"{name} is laid out as {placement}: upload with sharded=False")
    if tuple(value.to_local().shape) != tuple(shape):
        raise ShardsRefused(
            f"{name} has a shard of {list(value.to_local().shape)}, where {shape} was expected: "
            "upload with sharded=False"
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
    keys = [_key(one) for one in mine]
    owned_by = owners(gather_bytes(b"".join(keys)))
    return [one for one, key in zip(mine, keys, strict=True) if owned_by[key] == dist.get_rank()]


def owners(everyone: Sequence[bytes]) -> dict[bytes, int]:
    """Return the rank that publishes each shard, from all ranks' keys, in rank order."""
    holders: dict[bytes, list[int]] = {}
    for rank, keys in enumerate(everyone):
        for begin in range(0, len(keys), _KEY_BYTES):
            holders.setdefault(keys[begin : begin + _KEY_BYTES], []).append(rank)
    return {key: ranks[int.from_bytes(key, "big") % len(ranks)] for key, ranks in holders.items()}


def _key(shard: LocalShard) -> bytes:
    said = repr((shard.name, shard.global_shape, shard.offsets, tuple(shard.tensor.shape)))
    return xxhash.xxh3_64_digest(said.encode())
