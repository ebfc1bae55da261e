"""Ranks that cannot publish all of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trinity_events import Synchronizer
from trinity_events.errors import BufferFull
from trinity_events.weights import Publication, PublishedPartReport, ShardOffset
from trinity_events.weights.publishing.part_writer import Places


class FailsAtThirdTensor(Publication):
    """A part without room for a third tensor."""

    added = 0

    def add(self, name: str, tensor: torch.Tensor, place: ShardOffset | None = None) -> None:
        if self.added == 2:
            raise OSError("no room for the third tensor")
        self.added += 1
        super().add(name, tensor, place)

    def add_all(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], places: Places = None
    ) -> None:
        places = places or [None] * len(names)
        for name, tensor, place in zip(names, tensors, places, strict=True):
            self.add(name, tensor, place)


class NotTold(Publication):
    """A part that is whole, and the log does not take that."""

    def publish(self, seconds: float | None = None) -> PublishedPartReport:
        self.seal()
        raise BufferFull("run", "the event", "it is slow", backlog=4096)


class InSmallChunks(Synchronizer):
    """Sends chunks so small that some are stored before a part fails."""

    def __init__(self, run_id: str, epoch: int, **options: Any) -> None:
        super().__init__(run_id, epoch, **{**options, "chunk_bytes": 1024})


class FailingSynchronizer(InSmallChunks):
    """Fails on every rank that publishes."""

    def publication(self, global_step: int, rank: int = 0, **options: Any) -> Publication:
        return FailsAtThirdTensor(self._publisher, global_step, rank, **options)


class FailsOnRank1(InSmallChunks):
    """Fails on rank 1 alone, which has said that it begins."""

    def publication(self, global_step: int, rank: int = 0, **options: Any) -> Publication:
        kind = FailsAtThirdTensor if rank == 1 else Publication
        return kind(self._publisher, global_step, rank, **options)


class TellsNothingOnRank1(Synchronizer):
    """Rank 1's part is whole, and the log does not take that."""

    def publication(self, global_step: int, rank: int = 0, **options: Any) -> Publication:
        kind = NotTold if rank == 1 else Publication
        return kind(self._publisher, global_step, rank, **options)
