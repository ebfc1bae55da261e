"""Prefetch of weight versions while they are published, and their installation in an engine.

1. The synchronizer does one thing at a time: a read in flight ends before an installation begins.
2. Training never goes back to an older version. Only evaluations do, by ``install_again``.
3. A version that cannot be installed is skipped, and asked for again; the next one ends the wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from trinity_events.diagnostics.phases import PhaseClock
from trinity_events.errors import CorruptVersion, DeadlineExceeded, TrinityError, VersionUnavailable
from trinity_schemas import PublicationStarted, StepReady, StepRef, SyncRequested

from ..config.sync_schedule import publishes_on_demand
from ..config.train_config import RunConfig
from ..rollout_engines import RolloutEngine
from .run_follower import Followed, RunFollower
from .versions import VersionFollower

if TYPE_CHECKING:
    import torch

    from trinity_events import Synchronizer

logger = logging.getLogger(__name__)


class VersionPrefetcher:
    """Reads and verifies each version of an epoch while its publisher writes it, one at a time.

    Args:
        config: The run.
        synchronizer: Synchronizer of the explorer. The explorer pulls and loads with it only
            within :meth:`paused`.
    """

    def __init__(self, config: RunConfig, synchronizer: Synchronizer) -> None:
        self._config = config
        self._synchronizer = synchronizer
        self._stop = threading.Event()
        # Held by the read in flight; paused() waits here until the read that it stopped has ended.
        self._lock = anyio.Lock()
        self._opened: PublicationStarted | None = None
        """Version that is being published, as far as the run's announcements say."""
        self._into: torch.nn.Module | None = None
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def listening(self, run: RunFollower) -> AsyncIterator[None]:
        """Read each version as its publication is announced, for the block."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                async with run.listening(self._receive):
                    yield
            finally:
                self._tasks = None
                self._stop.set()  # The thread is waited for, and sees no cancellation.
                tasks.cancel_scope.cancel()

    async def _receive(self, announcement: Followed) -> None:
        match announcement:
            case PublicationStarted(epoch=epoch) if epoch == self._config.epoch:
                self._opened = announcement
                self._begin()

    def _begin(self) -> None:
        """Read the version that is being published; the one before is whole, or never will be."""
        self._stop.set()
        # One event for each read: the thread of the one before still looks at its own.
        self._stop = threading.Event()
        if self._tasks is not None and self._opened is not None:
            self._tasks.start_soon(self._read, self._opened, self._stop, self._into)

    @contextmanager
    def into(self, module: torch.nn.Module | None) -> Iterator[None]:
        """Write chunks into a module that serves nothing, for the block.

        Only :meth:`~trinity_events.Synchronizer.load` makes a version of what it holds then.
        """
        if module is None:
            yield
            return
        self._into = module
        self._begin()
        try:
            yield
        finally:
            self._into = None

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Prefetch nothing for the block."""
        # Stopped before it is waited for: a prefetch may last as long as the publication.
        self._stop.set()
        async with self._lock:
            yield

    async def _read(
        self, opened: PublicationStarted, stop: threading.Event, into: torch.nn.Module | None
    ) -> None:
        config = self._config
        async with self._lock:
            try:
                await anyio.to_thread.run_sync(
                    self._synchronizer.prefetch,
                    config.epoch,
                    opened,
                    stop,
                    config.sync.timeout,
                    into,
                )
            except (TrinityError, OSError) as error:  # The pull meets it too, and says more.
                logger.info("the weights of step %d were not prefetched: %s", opened.step, error)


class VersionInstaller:
    """Keeps an engine on the newest weight version of its epoch.

    Args:
        config: The run.
        engine: Engine of the explorer.
        synchronizer: Synchronizer that the engine installs from.
        versions: Follower of the run's versions.
        prefetcher: Prefetcher of the run's versions.
        clock: Clock of the explorer.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: RolloutEngine,
        synchronizer: Synchronizer,
        versions: VersionFollower,
        prefetcher: VersionPrefetcher,
        clock: PhaseClock | None = None,
    ) -> None:
        self._clock = clock or PhaseClock()
        self._config = config
        self._engine = engine
        self._synchronizer = synchronizer
        self._versions = versions
        self._prefetcher = prefetcher
        self.installed = 0
        """Versions that were installed so far."""

    @property
    def is_current(self) -> bool:
        """Return True if no version is ready that is newer than the served one."""
        serves = self._engine.serves
        return serves is not None and not self._versions.has(serves.step + 1)

    async def refresh(self, step: int) -> None:
        """Install the newest version, which must be of ``step`` or later.

        A version may be retired, or be found corrupt, before it is installed; then a newer one
        will do. A version that was sent to a collective group before the explorer joined it is
        asked for again, since the trainer may wait for this explorer.

        Raises:
            RunEnded: The run was closed before such a version was ready.
            DeadlineExceeded: No such version was ready in time.
        """
        reason: TrinityError | None = None
        while True:
            try:
                async with self._prefetched_into_engine(step):
                    ready = await self._newest(step)
            except DeadlineExceeded as late:
                if reason is None:
                    raise
                late.reason += f"; the last one failed: {reason}"
                raise late from reason
            newest = StepRef(ready.epoch, ready.step)
            if newest == self._engine.serves:
                return
            try:
                await self._install(ready)
            except (VersionUnavailable, CorruptVersion) as error:
                logger.warning("the explorer waits for newer weights: %s", error)
                reason = error
                # First: the next turn of the loop would take the same version again at once.
                self._versions.skip(newest)
                await anyio.to_thread.run_sync(self._request_another, ready)
                if self._serves(step):
                    return  # The trainer may wait for answers, and these weights will do.
            else:
                return

    def _request_another(self, failed: StepReady) -> None:
        """Request a version in the place of one that could not be installed, where that is usual.

        A trainer that publishes on request may wait for this explorer.
        """
        if publishes_on_demand(self._config.sync):
            successor = StepRef(failed.epoch, failed.step + 1)
            self._synchronizer.report(SyncRequested(oldest_version=successor))
        self._synchronizer.request_resend(failed)

    async def install_exactly(self, step: int) -> bool:
        """Install the version of ``step``; return False if a newer one has taken its place.

        Raises:
            VersionUnavailable: It cannot be read, and there is no newer one.
            CorruptVersion: It is damaged, and there is no newer one.
            RunEnded: The run was closed before it was ready.
            DeadlineExceeded: It was not ready in time.
        """
        version, serves = StepRef(self._config.epoch, step), self._engine.serves
        if serves is not None and serves >= version:
            return serves == version
        async with self._prefetched_into_engine(step):
            newest = await self._newest(step)
        ready = self._versions.get_announced(step)
        # Newer announcements have pushed it out of those that the follower remembers.
        if ready is None:
            return False
        try:
            await self._install(ready)
        except (VersionUnavailable, CorruptVersion):
            # A newer version has retired it meanwhile: the dispatcher then asks for that one.
            if newest.step == step and not self._versions.has(step + 1):
                raise
            return False
        return True

    async def announcement(self, version: StepRef) -> StepReady:
        """Return the announcement of a version, which may be to come, or one of an earlier time.

        Raises:
            VersionUnavailable: It was never announced, or that is no longer in the log.
            RunEnded: The run was closed before it was ready.
            DeadlineExceeded: It was not ready in time.
        """
        await self._versions.wait(version.step, deadline=self._config.sync.timeout)
        return await self._versions.find(version)

    async def install_again(self, ready: StepReady) -> None:
        """Install a version that may be older than the served one.

        Raises:
            VersionUnavailable: It cannot be read.
            CorruptVersion: It is damaged.
        """
        if StepRef(ready.epoch, ready.step) != self._engine.serves:
            await self._hold_and_install(ready)

    async def _install(self, ready: StepReady) -> None:
        await self._hold_and_install(ready)
        self.installed += 1

    async def _hold_and_install(self, ready: StepReady) -> None:
        with self._clock.phase("installing"):
            async with self._prefetcher.paused():
                await self._engine.install(ready)

    async def install_each(self) -> None:
        """Install each newer version as it comes, beside a generation, up to the last one.

        Raises RunEnded if the run was closed before that.
        """
        while True:
            serves = self._engine.serves
            if serves is not None and serves.step >= self._config.steps:
                return
            await self._versions.wait(serves.step + 1 if serves else 0, deadline=None)
            await self.refresh(0)

    async def _newest(self, step: int) -> StepReady:
        timeout = self._config.sync.timeout
        # A wait that lasts names the trainer: explain finds the first cause so (decision 24).
        reports = self._synchronizer.waits
        what = f"the weights of step {step}"
        with (
            self._clock.phase("waiting-weights"),
            reports.waiting(what, ["trainer-0"], deadline=timeout, step=step),
        ):
            return await self._versions.wait(step, deadline=timeout)

    def _serves(self, step: int) -> bool:
        serves = self._engine.serves
        return serves is not None and serves >= StepRef(self._config.epoch, step)

    @asynccontextmanager
    async def _prefetched_into_engine(self, step: int) -> AsyncIterator[None]:
        """Let arriving chunks go into the engine's own module while it has to wait for them."""
        sync = self._config.sync
        # Deltas need the module as it is, and no chunks of files arrive.
        if self._versions.has(step) or sync.full_every > 1 or sync.method == "checkpoint":
            yield
            return
        with self._prefetcher.into(await self._engine.release()):
            yield
