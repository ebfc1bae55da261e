"""Publishing a copy of each rank's shards, while training continues."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from logging import Logger
from typing import NamedTuple

from trinity_events.errors import DeadlineExceeded
from trinity_events.weights import Publication, Synchronizer
from trinity_events.weights.devices.staging_memory import StagingMemory

from ..engines.base import LocalShard
from ..runtime.collectives import raise_together, rank_and_world
from .publish_shards import write_shards
from .publishing import ModelWeights


class _StagedShards(NamedTuple):
    """Copied shards of a rank, and the part that they are sent as."""

    part: Publication
    shards: list[LocalShard]
    buffers: frozenset[str]


class PublishSnapshot:
    """Strategy that copies a rank's shards into staging memory and sends them from a thread.

    From a GPU the copies are only begun here: the thread waits for them, and later GPU operations
    run after them. The reported stall lasts until the copies are complete, which is the longest
    that training can have waited.

    The thread takes part in no collective. If one rank's thread fails, its part never comes and the
    log has the reason, so the version is never announced.

    Args:
        deadline: Seconds to wait for a version's publishing before the next one begins.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._staging = StagingMemory()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._sending: Future[None] | None = None
        self._step = 0

    def publish(
        self, weights: ModelWeights, synchronizer: Synchronizer, global_step: int, logger: Logger
    ) -> None:
        """Copy the shards, and begin to publish them as the version of ``global_step``. Collective.

        Raises on all ranks if a rank could not copy, or if the previous version could not be
        published. The call waits for the previous version, since it reuses its memory. Nothing
        else uses the synchronizer until :meth:`wait` returns.

        Raises:
            PeerFailed: on the ranks that did not fail themselves.
            CollectiveBroken: if a rank died or was too slow.
            ShardsRefused: if the model's layout cannot be published as shards.
            DeadlineExceeded: if the previous version takes too long.
        """
        shards = weights.shards()
        began = time.monotonic()
        rank, ranks = rank_and_world()
        part = synchronizer.publication(global_step, rank)
        error: Exception | None = None
        local_shards: list[LocalShard] = []
        try:
            self._wait_for_previous(synchronizer)
            local_shards = list(shards)  # where they are refused nothing was said of the version
            if rank == 0:
                synchronizer.open_version(global_step, ranks=range(ranks))
            copies = self._staging.copied([shard.tensor for shard in local_shards])
            local_shards = [
                LocalShard(shard.name, copy, shard.global_shape, shard.offsets)
                for shard, copy in zip(local_shards, copies, strict=True)
            ]
        except Exception as caught:
            error = caught
        try:
            raise_together(error)
        finally:
            if error is not None:
                part.fail(error)
        self._step = global_step
        stall = time.monotonic() - began
        sent = _StagedShards(part, local_shards, weights.buffers)
        self._sending = self._thread.submit(self._send, sent, began, stall, logger)

    def _wait_for_previous(self, synchronizer: Synchronizer) -> None:
        what = f"the publication of the weights of step {self._step}"
        with synchronizer.waits.waiting(what, deadline=self._deadline):
            self.wait()

    def wait(self) -> None:
        """Wait until the pending version is published; raise its error, once."""
        sending, self._sending = self._sending, None
        if sending is None:
            return
        try:
            sending.result(self._deadline)
        except TimeoutError:
            if sending.done():
                raise
            self._sending = sending
            raise DeadlineExceeded(
                f"the weights of step {self._step} were not published within "
                f"{self._deadline:g} s: is the server of the chunks slow?"
            ) from None

    def close(self) -> None:
        """Wait for the pending version and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=False)

    def _send(self, snapshot: _StagedShards, began: float, stall: float, logger: Logger) -> None:
        part = snapshot.part
        with part:
            if self._staging.settle():  # a GPU trains on meanwhile only as far as it may
                stall = time.monotonic() - began
            report = write_shards(part, snapshot.shards, snapshot.buffers)
            part.publish(stall)
        logger.info(
            "step %d: rank %d published %d bytes of a copy",
            part.global_step,
            part.rank,
            report.bytes,
        )
