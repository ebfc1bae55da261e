"""Publishing of each rank's own shards, without a gather."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from logging import Logger
from typing import Any

import torch.distributed as dist
import xxhash
from torch.distributed.tensor import DTensor, Shard

from trinity_events.errors import TrinityError
from trinity_events.weights import PartWriter, PublishedPartReport, Synchronizer
from trinity_events.weights.compatibility import plain_name
from trinity_events.weights.slices import ShardOffset, chunk_of

from ..collectives import PeerFailed, gather_bytes, raise_together, rank_and_world, together
from ..engines.base import LocalShard
from ..engines.buffers import saved_buffers
from .publishing import follow, give_up, write_shards

_KEY_BYTES = 8


class ShardsRefused(TrinityError):
    """Raised if the ranks' shards of the model cannot be published in their layout."""


def publish_shards(
    shards: Iterable[LocalShard], synchronizer: Synchronizer, global_step: int, logger: Logger
) -> None:
    """Publish every rank's shards as the version of ``global_step``. Collective.

    The version is ready once all ranks' parts are. If one rank fails, all ranks discard their parts
    and then raise; the version is never announced.

    Args:
        shards: Shards of this rank; the shards of all ranks are the whole model, once.
        synchronizer: Publishes this rank's part and its events, on every rank.
        global_step: Training step of the version.
        logger: Logs the published bytes.

    Raises:
        PeerFailed: on the ranks that did not fail themselves.
        CollectiveBroken: if a rank died or was too slow.
    """
    began = time.monotonic()
    rank, ranks = rank_and_world()
    writer: PartWriter | None = None
    report: PublishedPartReport | None = None
    error: Exception | None = None
    try:
        # First: where they are refused the version may be published in full, by rank 0 alone.
        held = list(shards)
        if rank == 0:
            synchronizer.open_version(global_step, ranks=range(ranks))
        writer = synchronizer.part_writer(global_step, rank)
        report = write_shards(writer, held)
    except Exception as caught:
        error = caught
    _agree(error, synchronizer, writer, global_step, logger)
    assert report is not None
    try:
        # Only now: a part that is told of is whole, and so is every other.
        synchronizer.part_published(global_step, rank, report, time.monotonic() - began)
    except Exception as caught:
        error = caught
    _agree(error, synchronizer, writer, global_step, logger)
    logger.info("step %d: rank %d published %d bytes", global_step, rank, report.bytes)


def _agree(
    error: Exception | None,
    synchronizer: Synchronizer,
    writer: PartWriter | None,
    step: int,
    logger: Logger,
) -> None:
    """Raise on all ranks if one failed, and discard the parts. Collective."""
    try:
        raise_together(error)
    except PeerFailed:
        follow(synchronizer, writer, step, logger)
        raise
    except Exception as caught:
        give_up(synchronizer, writer, step, caught, logger)
        raise


def fsdp_shards(module: Any) -> Iterator[LocalShard]:
    """Yield the shards that this rank publishes of an FSDP2 model.

    One rank publishes shards that several ranks hold. In a mesh it is the first rank along each
    replicated dimension. For tensors outside of a mesh the ranks take turns.

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
    # One rank must publish a tensor without elements, so that the manifest names it.
    empty = 0 in shape and (0 not in value.shape or not first)
    return None if empty else ShardOffset(tuple(begins), tuple(value.shape))


def without_replicas(shards: Iterable[LocalShard]) -> list[LocalShard]:
    """Return the shards that this rank publishes, if several ranks hold the same. Collective.

    A digest assigns each shard evenly to one of the ranks that hold it.
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
