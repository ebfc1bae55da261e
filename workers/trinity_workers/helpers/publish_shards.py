"""Publishing each rank's shards: nothing is gathered, and rank 0 sends no more than others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from logging import Logger

from trinity_events.weights import Publication, PublishedPartReport, ShardOffset, Synchronizer

from ..engines.base import LocalShard
from ..learning.finite import check_finite
from ..runtime.collectives import PeerFailed, rank_and_world, together
from .publishing import PUBLISHED, ModelWeights


class PublishShards:
    """Strategy by which every rank publishes its own shards, while training waits."""

    def publish(
        self, weights: ModelWeights, synchronizer: Synchronizer, global_step: int, logger: Logger
    ) -> None:
        """Publish every rank's shards as the version of ``global_step``. Collective.

        The version is ready once all ranks' parts are. When one rank fails, all discard what they
        wrote, then all raise; the version is never announced.

        Raises:
            PeerFailed: on the ranks that did not fail themselves.
            CollectiveBroken: when a rank died, or was too slow.
            ShardsRefused: if the model's layout cannot be published as shards.
            NonFiniteWeights: if a shard of a parameter has values that are not finite.
        """
        shards = weights.shards()
        rank, ranks = rank_and_world()
        opens = range(ranks) if rank == 0 else None
        with synchronizer.publication(global_step, rank, ranks=opens) as part:
            with _agreed(part):
                # First: refused shards leave the version unopened, to be published in full.
                local_shards = list(shards)
                report = write_shards(part, local_shards, weights.buffers)
            with _agreed(part):
                # Only now: a part in the log is whole, and so is every other.
                part.publish()
        logger.info("step %d: rank %d published %d bytes", global_step, rank, report.bytes)

    def close(self) -> None:
        """Do nothing: a version is published on return."""


def write_shards(
    part: Publication, shards: Sequence[LocalShard], buffers: Collection[str]
) -> PublishedPartReport:
    """Begin a rank's part, check and write its shards, and seal it.

    The check comes after the start, so that its failure is an event of the part.

    Raises:
        NonFiniteWeights: naming the first shard of a parameter with values that are not finite.
    """
    part.begin()
    check_finite(((shard.name, shard.tensor) for shard in shards), PUBLISHED, exempt=buffers)
    places = [ShardOffset(shard.offsets, shard.global_shape) for shard in shards]
    part.add_all([shard.name for shard in shards], [shard.tensor for shard in shards], places)
    return part.seal()


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
