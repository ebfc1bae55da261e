"""Saves of all ranks that go on while they train."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta

import torch.distributed as dist

from trinity_events.errors import DeadlineExceeded, SaveError


class BackgroundSaves:
    """Thread for the saves of one rank, with a process group of their own.

    Saves run one after the other, in the order in which they were begun, which must be the same on
    all ranks. Making one is collective.

    Args:
        timeout: Maximum time that ranks wait for each other in a save, and for all of their saves.
    """

    def __init__(self, timeout: timedelta) -> None:
        # Its own group: in that of training, collectives of both threads would be matched in
        # another order on each rank. Gloo, since what is saved was copied to the CPU.
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self._seconds = timeout.total_seconds()
        # One thread: two saves at once could meet in their collectives in another order.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._begun: list[tuple[str, Future[None]]] = []

    def begin(self, what: str, save: Callable[[], None]) -> None:
        """Run a save when those before it have ended; what it raises is kept for :meth:`wait`."""
        self._begun.append((what, self._thread.submit(save)))

    def settle(self) -> None:
        """Wait until all saves have succeeded or failed.

        Raises:
            DeadlineExceeded: Some have done neither within the timeout.
        """
        began = time.monotonic()
        _, pending = wait([future for _, future in self._begun], self._seconds)
        if pending:
            late = ", ".join(what for what, future in self._begun if future in pending)
            raise DeadlineExceeded(
                "not all saves ended",
                round(time.monotonic() - began),
                f"{late}: is the storage slow, or sync.timeout too short?",
            )

    def wait(self) -> None:
        """Wait until all saves have succeeded.

        Raises:
            DeadlineExceeded: as :meth:`settle`.
            SaveError: when any failed since the last call, naming the first and holding all.
        """
        self.settle()
        begun, self._begun = self._begun, []
        failed = [
            (what, error) for what, future in begun if (error := future.exception()) is not None
        ]
        if failed:
            raise SaveError(failed[0][0], tuple(error for _, error in failed))

    def close(self) -> None:
        """Refuse further saves."""
        # wait() comes before. If that met its deadline, this must not wait without one.
        self._thread.shutdown(wait=False)
