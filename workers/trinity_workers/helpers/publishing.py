"""Common parts of uploads and broadcasts: writing a version's part, and giving it up."""

from __future__ import annotations

from collections.abc import Iterable
from logging import Logger
from typing import Protocol

import torch

from trinity_events.weights import PartWriter, PublishedPartReport, ShardOffset, Synchronizer

from ..collectives import rank_and_world
from ..engines.base import LocalShard, NamedTensors


class TakesTensors(Protocol):
    """Destination of full tensors, one by one."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor."""
        ...


def drain(
    tensors: NamedTensors, taker: TakesTensors | None, error: Exception | None
) -> Exception | None:
    """Take part in every gather; write until an error occurs, and return that error."""
    for name, tensor in tensors:
        if taker is not None and error is None:
            try:
                taker.add(name, tensor)
            except Exception as caught:
                error = caught  # the others are inside the gathers: go on with them
    return error


def write_shards(writer: PartWriter, shards: Iterable[LocalShard]) -> PublishedPartReport:
    """Write a rank's shards as its part, and seal the part."""
    for one in shards:
        writer.add(one.name, one.tensor, ShardOffset(one.offsets, one.global_shape))
    return writer.seal()


def give_up(
    synchronizer: Synchronizer,
    writer: PartWriter | None,
    step: int,
    error: Exception,
    logger: Logger,
) -> None:
    """Publish the failure and discard the part, as far as the servers respond."""
    try:
        synchronizer.part_failed(step, rank_and_world()[0], error)
    except Exception:
        logger.exception("step %d: the failure of the upload could not be published", step)
    _take_back(writer, step, logger)


def follow(
    synchronizer: Synchronizer, writer: PartWriter | None, step: int, logger: Logger
) -> None:
    """Give up because another rank failed, which publishes the reason; discard the part."""
    try:
        synchronizer.part_given_up(rank_and_world()[0])
    except Exception:
        logger.exception("step %d: that the upload was given up could not be published", step)
    _take_back(writer, step, logger)


def _take_back(writer: PartWriter | None, step: int, logger: Logger) -> None:
    """Discard the part, as far as its server responds."""
    try:
        if writer is not None:
            writer.discard()
    except Exception:
        logger.exception("step %d: what was sent of the weights stays until it expires", step)
