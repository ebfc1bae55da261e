"""Sender at the trainer's rank 0, which publishes veRL's gathered weights as versions.

1. The gathers run to their end, whatever fails here: the other ranks take part in them.
2. A version never changes. A step that is sent again is a version of another epoch.
3. Before :meth:`WeightSender.send` ends, the version is published, or its failure is in the log, if
   the server can be reached. So rollouts learn of it from the log, and not by their deadline.
4. While weights are sent, the event loop's thread, which is the one that trains, waits for no
   server.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress

from trinity_events import Synchronizer
from trinity_events.errors import TrinityError
from trinity_events.log import RedisEventLog, Stream, open_run
from trinity_events.server import connect
from trinity_events.weights import Publication, PublishedPartReport
from trinity_schemas import RunTransport

from ..runtime.collective_errors import CollectiveBroken
from .settings import Settings
from .streaming import Take, Weights, drain
from .thread import OneThread
from .topology import OpenedRun, Topology

logger = logging.getLogger(__name__)


class WeightSender:
    """Sender that opens the run and publishes its versions.

    One separate thread waits for the servers.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._run_id = settings.run_id or f"verl-{secrets.token_hex(4)}"
        self._epoch = 0
        self._begun: int | None = None
        """Step of the newest version that was begun in this epoch, complete or not."""
        self._transport: RunTransport | None = None
        self._previous_transport: RunTransport | None = None
        """Transport of the newest version, if it was published completely."""
        self._rollouts = 0
        self._synchronizer: Synchronizer | None = None
        self._thread = OneThread()

    def open(self) -> OpenedRun:
        """Return the run, opened at the first call, and the current position of its log."""
        return self._thread.wait(self._open_run)

    def meet(self, meeting: Topology) -> None:
        """Record the transport of the weights and the number of receivers."""
        self._rollouts = meeting.rollouts
        if meeting.transport != self._transport:
            self._transport = meeting.transport
            self._thread.wait(self._forget_synchronizer)

    async def send(self, weights: Weights, global_steps: int | None) -> dict[str, float]:
        """Publish a version, which is complete on return. Raises if it will not be announced.

        Args:
            weights: Full tensors by name; always exhausted, since other ranks gather them too.
            global_steps: Step of the version; None is the next step.
        """
        began = time.monotonic()
        step = global_steps
        if step is None:
            step = 1 if self._begun is None else self._begun + 1
        part: Publication | None = None
        error: Exception | None = None
        try:
            part = await self._thread.begin(self._begin, step)
        except Exception as caught:
            error = caught
        try:
            error = await drain(
                weights,
                None if part is None else self._adder_to(part),
                error,
                # A second collective at the same time may stand in the gathers' way.
                ahead=self._transport != "collective",
            )
        except Exception as caught:
            error = CollectiveBroken("gather", str(caught), step)
            error.__cause__ = caught
        if error is None:
            assert part is not None
            try:
                report = await self._thread.begin(self._finish, part, began)
            except Exception as caught:
                error = caught
        if error is not None:
            await self._thread.begin(self._give_up, step, part, error)
            raise error
        return {
            "checkpoint_engine/payload_mbytes": report.bytes / (1 << 20),
            "checkpoint_engine/publish_seconds": time.monotonic() - began,
        }

    def _adder_to(self, part: Publication) -> Take:
        return lambda name, tensor: self._thread.begin(part.add, name, tensor)

    def close(self) -> None:
        """Close the connections, and release versions that are published through memory."""
        try:
            self._thread.wait(self._forget_synchronizer)
        finally:
            self._thread.end()

    # --- in the thread ---------------------------------------------------------------------

    def _open_run(self, resume_from: int | None = None) -> OpenedRun:
        return asyncio.run(self._open(resume_from))

    async def _open(self, resume_from: int | None) -> OpenedRun:
        async with connect(self._settings.redis_url) as client:
            if not self._epoch or resume_from is not None:
                self._epoch = await open_run(
                    client,
                    self._run_id,
                    resume_from=resume_from,
                    deadline=self._settings.deadline,
                )
                logger.info("veRL's weights are versions of run %s", self._run_id)
            log = RedisEventLog(client, self._run_id)
            return OpenedRun(
                run_id=self._run_id,
                epoch=self._epoch,
                transport=self._settings.transport,
                previous_transport=self._previous_transport,
                # Read at each call: what follows from earlier entries is of an earlier attempt.
                newest_entry=await log.last_id(Stream.EVENTS),
                announced=await log.last_id(Stream.ANNOUNCEMENTS),
            )

    def _begin(self, step: int) -> Publication:
        if self._begun is not None and step <= self._begun:
            # The trainer went back, or sends a step's weights once more: a version never changes,
            # and that it failed is announced once, so they are those of another epoch.
            self._forget_synchronizer()
            self._open_run(resume_from=step)
        self._begun = step
        synchronizer = self._get_synchronizer()
        if self._transport == "collective":
            synchronizer.setup_weight_sync_group(self._rollouts, timeout=self._settings.deadline)
        part = synchronizer.publication(step, 0, ranks=(0,))
        part.begin()
        return part

    def _finish(self, part: Publication, began: float) -> PublishedPartReport:
        part.seal()
        report = part.publish(time.monotonic() - began)
        synchronizer = self._get_synchronizer()
        synchronizer.commit(part.global_step)
        synchronizer.flush()
        self._previous_transport = self._transport
        logger.info("step %d: published %d bytes", part.global_step, report.bytes)
        return report

    def _give_up(self, step: int, part: Publication | None, error: Exception) -> None:
        self._previous_transport = None
        with suppress(TrinityError, OSError):  # the error itself says more
            (part or self._get_synchronizer().publication(step, 0)).fail(error)
            self._get_synchronizer().flush()

    def _get_synchronizer(self) -> Synchronizer:
        if self._synchronizer is None:
            assert self._transport is not None
            self._synchronizer = Synchronizer(
                self._run_id,
                self._epoch,
                redis_url=self._settings.redis_url,
                weights_url=self._settings.weights_url,
                transport=self._transport,
                full_every=self._settings.full_every,
                deadline=self._settings.deadline,
            )
        return self._synchronizer

    def _forget_synchronizer(self) -> None:
        synchronizer, self._synchronizer = self._synchronizer, None
        if synchronizer is not None:
            synchronizer.close()
