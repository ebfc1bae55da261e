"""Publishing full tensors from rank 0, while all ranks gather."""

from __future__ import annotations

from logging import Logger

from trinity_events.weights import Synchronizer

from ..runtime.collectives import CollectiveBroken, PeerFailed, raise_together, rank_and_world
from .publishing import ModelWeights, drain


class PublishFull:
    """Strategy that streams full tensors one by one: no rank ever holds the whole model."""

    def publish(
        self, weights: ModelWeights, synchronizer: Synchronizer, global_step: int, logger: Logger
    ) -> None:
        """Publish full tensors as the version of ``global_step``, from rank 0. Collective.

        If rank 0 fails, all ranks finish the gathers and then raise; the version is never
        announced. If the gathers fail because a rank died, every other rank publishes the failure.

        Raises:
            PeerFailed: on the ranks that did not fail themselves.
            CollectiveBroken: if a rank died or was too slow.
            NonFiniteWeights: on rank 0, if a parameter has values that are not finite.
        """
        rank, _ = rank_and_world()
        part = synchronizer.publication(global_step, rank, ranks=(0,))
        error: Exception | None = None
        if rank == 0:
            try:
                part.begin()
            except Exception as caught:
                error = caught
        try:
            sink = part if rank == 0 else None
            error = drain(weights.full(), sink, error, buffers=weights.buffers)
        except Exception as caught:
            broken = CollectiveBroken(
                f"the weights of step {global_step} could not be gathered, because a rank died or "
                f"was too slow: {caught}"
            )
            part.fail(broken)
            raise broken from caught
        if rank == 0 and error is None:
            try:
                part.publish()
            except Exception as caught:
                error = caught
        try:  # the others first: they hold the training loop, and a server may be slow to answer
            raise_together(error)
        except PeerFailed:  # rank 0, whose event has the reason
            raise
        except Exception as caught:
            if not part.published:  # rank 0 may have died before it could publish
                part.fail(error or caught)
            raise
        if part.report is not None:
            logger.info("step %d: published %d bytes", global_step, part.report.bytes)

    def close(self) -> None:
        """Do nothing: a version is published on return."""


FULL = PublishFull()
"""Default strategy of uploads; it keeps nothing between versions."""
