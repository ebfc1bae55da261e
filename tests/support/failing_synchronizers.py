"""Ranks that cannot publish all of their weights."""

from __future__ import annotations

from typing import Any

import torch

from trinity_events import Synchronizer
from trinity_events.errors import BufferFull
from trinity_events.weights import PartWriter, PublishedPartReport, ShardOffset


class FailsAtThirdTensor(PartWriter):
    """A part's writer without room for a third tensor."""

    def add(self, name: str, tensor: torch.Tensor, place: ShardOffset | None = None) -> None:
        if len(self._tensors) == 2:
            raise OSError("no room for the third tensor")
        super().add(name, tensor, place)


class FailingSynchronizer(Synchronizer):
    """Fails on every rank that publishes."""

    def part_writer(self, global_step: int, rank: int, **options: Any) -> PartWriter:
        return FailsAtThirdTensor(self._store, self._part(global_step, rank), chunk_bytes=1024)


class FailsOnRank1(Synchronizer):
    """Fails on rank 1 alone, which has said that it begins."""

    def part_writer(self, global_step: int, rank: int, **options: Any) -> PartWriter:
        writer = super().part_writer(global_step, rank, **options)
        if rank != 1:
            return writer
        return FailsAtThirdTensor(self._store, self._part(global_step, rank), chunk_bytes=1024)


class TellsNothingOnRank1(Synchronizer):
    """Rank 1's part is whole, and the log does not take that."""

    def part_published(
        self, global_step: int, rank: int, report: PublishedPartReport, seconds: float
    ) -> None:
        if rank == 1:
            raise BufferFull("no server took the last 4096 events")
        super().part_published(global_step, rank, report, seconds)
