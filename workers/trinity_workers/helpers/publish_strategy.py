"""Strategies by which the ranks of a trainer publish a version, and the choice of one."""

from __future__ import annotations

from logging import Logger
from typing import Protocol

from trinity_events.weights import Synchronizer

from ..config.sections.sync import PublishedForm
from .publish_full import PublishFull
from .publish_shards import PublishShards
from .publish_snapshot import PublishSnapshot
from .publishing import ModelWeights


class PublishStrategy(Protocol):
    """Strategy of one rank. All ranks of a trainer use the same one."""

    def publish(
        self, weights: ModelWeights, synchronizer: Synchronizer, global_step: int, logger: Logger
    ) -> None:
        """Publish the weights, as they are now, as the version of ``global_step``. Collective.

        If a rank fails, all ranks raise, and the version is never announced.

        Args:
            weights: Weights of the rank's engine.
            synchronizer: Publishes the part and its events.
            global_step: Training step, which names the version.
            logger: Logs the published bytes.
        """
        ...

    def close(self) -> None:
        """Wait for a version that is published in the background. Raises what failed in it."""
        ...


def strategy_for(form: PublishedForm, deadline: float) -> PublishStrategy:
    """Return the strategy that publishes in a form.

    Args:
        form: Full tensors from rank 0, shards from each rank, or a snapshot of those shards.
        deadline: Seconds to wait for the snapshot of a version before the next one begins.
    """
    if form == "full":
        return PublishFull()
    return PublishShards() if form == "shards" else PublishSnapshot(deadline)
