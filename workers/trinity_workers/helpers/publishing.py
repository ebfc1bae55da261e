"""Helpers of uploads and broadcasts: drain the gathers, and write a rank's shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from trinity_events.weights import Publication, PublishedPartReport, ShardOffset

from ..engines.base import LocalShard, NamedTensors


class TakesTensors(Protocol):
    """Sink that takes full tensors one by one."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor."""
        ...


def drain(
    tensors: NamedTensors, taker: TakesTensors | None, error: Exception | None
) -> Exception | None:
    """Take part in every gather, and write as long as nothing went wrong; returns what did."""
    for name, tensor in tensors:
        if taker is not None and error is None:
            try:
                taker.add(name, tensor)
            except Exception as caught:
                error = caught  # the others are inside the gathers: go on with them
    return error


def write_shards(part: Publication, shards: Iterable[LocalShard]) -> PublishedPartReport:
    """Begin a rank's part, write its shards, and seal it."""
    part.begin()
    for one in shards:
        part.add(one.name, one.tensor, ShardOffset(one.offsets, one.global_shape))
    return part.seal()
