"""Publishing from a copy: training waits for one copy of what the rank holds, and for no more."""

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
    """Copies a rank's shards into staging memory, and publishes them from a thread of its own.

    From a GPU the copies are only begun here: the thread waits for them, and what the GPU is told
    to do next comes behind them. The stall that is told of then lasts until they are there, which
    is the most that training can have been held.

    The thread takes part in no collective: when one rank's fails, its part never comes, the log
    says why, and so the version is never seen.

    Args:
        synchronizer: Where to. Nobody else uses it while versions are published.
        deadline: Seconds that a version is given to be published, once the next is to be.
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

        Raises on all ranks when a rank could not copy, or when the version before could not be
        published; that one's memory is used again, so it is waited for.
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
        """Wait until what was begun is published; raises what failed in it, once."""
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
        """Wait, and end the thread."""
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
