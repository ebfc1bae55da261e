"""Publishing from a copy, so that training waits only for the copy of a rank's shards."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from logging import Logger

from trinity_events.errors import DeadlineExceeded
from trinity_events.weights import Synchronizer
from trinity_events.weights.devices.staging_memory import StagingMemory

from ..collectives import raise_together, rank_and_world
from ..engines.base import LocalShard
from .publishing import write_shards


class SnapshotUploads:
    """Publisher that copies a rank's shards into staging memory and sends them from a thread.

    From a GPU the copies are only begun here: the thread waits for them, and later GPU operations
    run after them. The reported stall lasts until the copies are complete, which is the longest
    that training can have waited.

    The thread takes part in no collective. If one rank's thread fails, its part never comes and the
    log has the reason, so the version is never announced.

    Args:
        synchronizer: Publishes the parts. No other thread uses it while versions are published.
        deadline: Seconds to wait for a version's publishing before the next one begins.
    """

    def __init__(self, synchronizer: Synchronizer, deadline: float) -> None:
        self._synchronizer = synchronizer
        self._deadline = deadline
        self._staging = StagingMemory()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._sending: Future[None] | None = None
        self._step = 0

    def begin(self, shards: Iterable[LocalShard], global_step: int, logger: Logger) -> None:
        """Copy the shards, and begin to publish them as the version of ``global_step``. Collective.

        Raises on all ranks if a rank could not copy, or if the previous version could not be
        published. The call waits for the previous version, since it reuses its memory.
        """
        began = time.monotonic()
        rank, ranks = rank_and_world()
        error: Exception | None = None
        held: list[LocalShard] = []
        try:
            self.wait()
            held = list(shards)  # where they are refused nothing was said of the version
            if rank == 0:
                self._synchronizer.open_version(global_step, ranks=range(ranks))
            copies = self._staging.copied([one.tensor for one in held])
            held = [
                LocalShard(one.name, copy, one.global_shape, one.offsets)
                for one, copy in zip(held, copies, strict=True)
            ]
        except Exception as caught:
            error = caught
        try:
            raise_together(error)
        finally:
            if error is not None:
                self._synchronizer.publication(global_step, rank).fail(error)
        self._step = global_step
        stall = time.monotonic() - began
        self._sending = self._thread.submit(
            self._send, held, global_step, rank, began, stall, logger
        )

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

    def _send(
        self,
        shards: list[LocalShard],
        step: int,
        rank: int,
        began: float,
        stall: float,
        logger: Logger,
    ) -> None:
        with self._synchronizer.publication(step, rank) as part:
            if self._staging.settle():  # a GPU trains on meanwhile only as far as it may
                stall = time.monotonic() - began
            report = write_shards(part, shards)
            part.publish(stall)
        logger.info("step %d: rank %d published %d bytes of a copy", step, rank, report.bytes)
