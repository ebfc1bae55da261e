"""Rollout's receiver, which waits for a version, pulls it, and passes on its tensors.

1. What is received for a step is the verified version of that step, or an error.
2. Only announcements that follow from entries after the last :meth:`WeightReceiver.meet` count: an
   earlier one is of an attempt that veRL has given up (decision 20).
3. A version is held until :meth:`WeightReceiver.finish`, as a rollout may read its tensors until
   then. It is reported as served only if every tensor was passed on.
4. Another update ends the one before: its wait ends, and it passes on no further tensor.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, suppress

import anyio
import torch
from msgspec import Struct

from trinity_events import Synchronizer
from trinity_events.errors import TrinityError, VersionNotAnnounced
from trinity_events.weights import PulledVersion
from trinity_events.weights.transports.collective import CollectiveStore
from trinity_schemas import AppliedPhases, StepReady, VersionOpened

from .base_cache import BaseCache
from .settings import Settings
from .thread import OneThread
from .topology import Topology
from .waiting import wait_for_version

logger = logging.getLogger(__name__)


class VersionInUse(Struct, kw_only=True):
    """Version whose tensors are being passed on."""

    version: PulledVersion
    fetch: float
    """Seconds from the wait's beginning until the version was announced, fetched and verified."""
    verified_at: float
    """Unix time of the verification, in seconds."""
    since: float
    """Time of the verification, on the clock of :func:`time.monotonic`."""
    whole: bool = False
    """True if every tensor was passed on."""


class WeightReceiver:
    """Receiver of the versions of one run, one after the other.

    A version is held until the update is finished, since its tensors may be read until then. One
    separate thread waits for the servers.
    """

    def __init__(self, settings: Settings, rank: int, meeting: Topology) -> None:
        self.rank = rank
        self.run_id = meeting.opened.run_id
        self._settings = settings
        self._meeting: Topology | None = meeting
        self._device = _device(settings.device)
        self._bases = BaseCache()
        self._resources = ExitStack()
        self._in_use: VersionInUse | None = None
        self._stop = threading.Event()
        self._waiting: tuple[asyncio.AbstractEventLoop, anyio.CancelScope] | None = None
        self._thread = OneThread()
        self._synchronizer = Synchronizer(
            self.run_id,
            0,
            redis_url=settings.redis_url,
            weights_url=settings.weights_url,
            role="explorer",
            rank=rank,
            deadline=settings.deadline,
        )

    def meet(self, meeting: Topology) -> None:
        """Record the topology of the next version, and release the last version.

        An update that failed elsewhere may still wait here; it is ended.
        """
        self._supersede()
        self._meeting = meeting
        # In the thread, and so after a pull that still runs there.
        self._thread.wait(self._release)
        if meeting.transport == CollectiveStore.name:
            self._thread.wait(self._synchronizer.join_weight_sync_group)

    async def receive(self, step: int | None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the verified tensors of that step's version.

        On a CPU they are read-only, and valid until :meth:`finish`.

        Raises:
            VersionUnavailable: if it will not come, is gone, or another update began meanwhile.
            DeadlineExceeded: if it was not announced in time.
            CorruptVersion: if its bytes are not the announced ones.
        """
        began, meeting = time.monotonic(), self._meeting
        ready = await self._wait_for_version(step, meeting)
        version = await self._thread.begin(self._pull, ready)
        self._check(meeting, step)
        now = time.monotonic()
        self._in_use = in_use = VersionInUse(
            version=version, fetch=now - began, verified_at=time.time(), since=now
        )
        tensors = version.tensors()
        while (named := await self._next(tensors, version)) is not None:
            self._check(meeting, step)
            yield named
            # The rollout loads the tensor meanwhile, and another update may begin.
            self._check(meeting, step)
        in_use.whole = True

    def finish(self) -> None:
        """Report that the engine serves the version, if it received every tensor."""
        self._thread.wait(self._finish)

    def close(self) -> None:
        """Release all resources."""
        self._supersede()
        try:
            self._thread.wait(self._close)
        finally:
            self._thread.end()

    def _supersede(self) -> None:
        """End the wait of the previous update, if it still waits."""
        self._stop.set()
        if self._waiting is not None:
            loop, scope = self._waiting
            # The update may wait in a loop of another thread.
            loop.call_soon_threadsafe(scope.cancel)
            self._waiting = None
        self._meeting = None

    def _check(self, meeting: Topology | None, step: int | None) -> None:
        if self._meeting is not meeting:
            raise VersionNotAnnounced(
                f"weights of {'the next step' if step is None else f'step {step}'} of run "
                f"{self.run_id}",
                fault="interrupted",
            )

    async def _wait_for_version(self, step: int | None, meeting: Topology | None) -> StepReady:
        """Wait for the announcement; verify bytes that arrive before it meanwhile."""
        assert meeting is not None, "meet comes before"
        settings, opened = self._settings, meeting.opened
        self._stop = stop = threading.Event()
        along = None
        if step is not None:
            coming = VersionOpened(step=step, ranks=(0,), transport=meeting.transport)
            along = self._thread.begin(
                self._synchronizer.prefetch, opened.epoch, coming, stop, settings.deadline
            )
        try:
            # A scope, since a client may swallow a task's cancellation; a scope repeats it.
            with anyio.CancelScope() as scope:
                self._waiting = waiting = asyncio.get_running_loop(), scope
                return await wait_for_version(settings.redis_url, opened, step, settings.deadline)
        finally:
            if self._waiting is waiting:
                self._waiting = None
            stop.set()
            if along is not None:
                # the pull raises the same error, with more details
                with suppress(TrinityError, OSError):
                    await along
        self._check(meeting, step)
        raise AssertionError("only another update ends the wait")

    async def _next(
        self, tensors: Iterator[tuple[str, torch.Tensor]], version: PulledVersion
    ) -> tuple[str, torch.Tensor] | None:
        """Return the next tensor, on the device; the thread does all but making views."""
        # Views of verified bytes; a tensor of a delta is computed as it is read.
        if self._device is None and all(manifest.base is None for manifest, _ in version.parts):
            return next(tensors, None)
        return await self._thread.begin(self._move, tensors)

    # --- in the thread ---------------------------------------------------------------------

    def _pull(self, ready: StepReady) -> PulledVersion:
        self._release()
        have = self._bases.digests
        pulled = self._resources.enter_context(self._synchronizer.pull(ready, have=have))
        version = self._bases.complete(pulled)
        # Without deltas the cache would hold the memory of a version for nothing.
        if self._settings.full_every > 1:
            self._bases.add(ready, pulled, self._resources)
        return version

    def _move(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> tuple[str, torch.Tensor] | None:
        for name, tensor in tensors:
            return name, tensor if self._device is None else tensor.to(self._device)
        return None

    def _finish(self) -> None:
        in_use = self._in_use
        try:
            if in_use is not None and in_use.whole:
                phases = AppliedPhases(fetch=in_use.fetch, pause=time.monotonic() - in_use.since)
                self._synchronizer.applied(in_use.version, in_use.verified_at, phases)
        finally:
            self._release()

    def _release(self) -> None:
        self._in_use = None
        self._resources.close()

    def _close(self) -> None:
        self._release()
        self._bases.forget()
        self._synchronizer.close()


def _device(name: str | None) -> torch.device | None:
    """Return the device for the tensors, or None to leave them in this host's memory."""
    if name is not None:
        return None if name == "cpu" else torch.device(name)
    if not torch.accelerator.is_available():
        return None
    index = torch.accelerator.current_device_index()
    return torch.device(torch.accelerator.current_accelerator().type, index)  # type: ignore[union-attr]
