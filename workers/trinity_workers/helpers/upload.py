"""Common part of all engines' uploads: rank 0 publishes while all ranks gather."""

from __future__ import annotations

import time
from logging import Logger

from trinity_events.weights import PartWriter, PublishedPartReport, Synchronizer

from ..collectives import CollectiveBroken, raise_together, rank_and_world
from ..engines.base import NamedTensors
from .publishing import drain, give_up


def publish_stream(
    tensors: NamedTensors, synchronizer: Synchronizer, global_step: int, logger: Logger
) -> None:
    """Publish full tensors as the version of ``global_step``, streamed from rank 0. Collective.

    If rank 0 fails, all ranks finish the gathers and then raise; the version is never announced. If
    the gathers fail because a rank died, every other rank publishes the failure.

    Args:
        tensors: Full tensors, gathered on all ranks as the iterator advances.
        synchronizer: Publishes the part and its events, on rank 0.
        global_step: Training step of the version.
        logger: Logs the published bytes.

    Raises:
        PeerFailed: on the ranks that did not fail themselves.
        CollectiveBroken: if a rank died or was too slow.
    """
    began = time.monotonic()
    rank, _ = rank_and_world()
    writer: PartWriter | None = None
    report: PublishedPartReport | None = None
    error: Exception | None = None
    if rank == 0:
        try:
            synchronizer.open_version(global_step, ranks=(0,))
            writer = synchronizer.part_writer(global_step, 0)
        except Exception as caught:
            error = caught
    try:
        error = drain(tensors, writer, error)
    except Exception as caught:
        broken = CollectiveBroken(
            f"the weights of step {global_step} could not be gathered, because a rank died or was "
            f"too slow: {caught}"
        )
        give_up(synchronizer, writer, global_step, broken, logger)
        raise broken from caught
    if writer is not None and error is None:
        try:
            report = writer.seal()
            synchronizer.part_published(global_step, 0, report, time.monotonic() - began)
        except Exception as caught:
            error = caught
    try:
        raise_together(error)
    except CollectiveBroken as caught:
        if rank != 0:  # which may have died before it could publish
            error = caught
        raise
    finally:  # the others first: they hold the training loop, and a server may be slow to answer
        if error is not None:
            give_up(synchronizer, writer, global_step, error, logger)
    if report is not None:
        logger.info("step %d: published %d bytes", global_step, report.bytes)
