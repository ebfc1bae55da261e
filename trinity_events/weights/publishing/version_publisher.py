"""Publisher of one process's parts of versions: their events, attempts and retired chunks."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import redis
import torch

from trinity_schemas import StepRef, VersionOpened, VersionPartPublished

from ...diagnostics.waits import WaitReporter
from ...log.retry import is_transient
from ..deltas.tracker import LastPublished
from ..session import Session
from ..transports.base import PartRef
from .part_attempt import PartAttempt
from .part_layout import LastLayout
from .publish import PartWriter, PublishedPartReport
from .ready_versions import ReadyVersions

logger = logging.getLogger(__name__)


class VersionPublisher:
    """Publisher of versions in a session. :class:`~trinity_events.weights.Publication` drives it.

    Args:
        session: Connections that it publishes through.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._settings = session.settings
        self._attempts: dict[int, PartAttempt] = {}
        """Running attempts by rank."""
        self._ranks: set[int] = set()
        """Ranks that published from this process."""
        self._ready_versions = ReadyVersions()
        self._last: dict[int, LastPublished] = {}
        self._last_layouts: dict[int, LastLayout] = {}

    @property
    def waits(self) -> WaitReporter:
        """Reporter of this process's long waits."""
        return self._session.events.waits

    def open_version(self, global_step: int, ranks: Iterable[int]) -> None:
        """Publish that these ranks will publish a version."""
        transport = self._settings.transport
        self._session.events.publish(
            VersionOpened(step=global_step, ranks=tuple(ranks), transport=transport)
        )

    def begin_part(
        self, global_step: int, rank: int, *, subset: bool, dtype: torch.dtype | None
    ) -> PartWriter:
        """Return a writer of one rank's part, after freeing this process's retired versions.

        This publishes the start of the attempt, and sends heartbeats until
        :meth:`part_published`, :meth:`part_failed` or :meth:`part_given_up`.
        """
        self._ranks.add(rank)
        self._free_retired()
        self.part_given_up(rank)
        self._attempts[rank] = attempt = self._attempt(global_step, rank)
        attempt.begin()
        settings = self._settings
        part, last = PartRef(settings.run_id, settings.epoch, global_step, rank), None
        if settings.full_every > 1 and not subset:
            last = self._last.setdefault(rank, LastPublished(settings.full_every))
            last.begin(part, self._is_stored)
        return PartWriter(
            self._session.store,
            part,
            settings.chunk_bytes,
            subset=subset,
            last=last,
            tensor_digests=settings.tensor_digests,
            dtype=dtype or settings.dtype,
            last_layout=self._last_layouts.setdefault(rank, LastLayout()),
        )

    def part_published(
        self, global_step: int, rank: int, report: PublishedPartReport, seconds: float
    ) -> None:
        """Publish that a part is whole. ``seconds`` is the stall of the training loop."""
        attempt = self._pop_attempt(global_step, rank)
        try:
            self._session.events.publish(
                VersionPartPublished(
                    step=global_step,
                    rank=rank,
                    manifest_digest=report.manifest_digest,
                    bytes=report.bytes,
                    tensors=report.tensors,
                    chunks=report.chunks,
                    seconds=seconds,
                    delta=report.delta,
                    save_id=None if attempt is None else attempt.save_id,
                )
            )
        finally:
            if attempt is not None:
                attempt.end()

    def part_failed(self, global_step: int, rank: int, error: BaseException) -> None:
        """Publish that a part failed, with the reason."""
        attempt = self._pop_attempt(global_step, rank) or self._attempt(global_step, rank)
        try:
            self._session.events.publish(attempt.failure(error))
        finally:
            attempt.end()

    def part_given_up(self, rank: int) -> None:
        """Publish that the rank gave up its part; another rank's event has the reason."""
        attempt = self._attempts.pop(rank, None)
        if attempt is not None:
            try:
                error = RuntimeError("it was given up")
                self._session.events.publish(attempt.failure(error, followed=True))
            finally:
                attempt.end()

    def give_up(self) -> None:
        """Publish that all ranks of this process gave up their running parts."""
        for rank in list(self._attempts):
            self.part_given_up(rank)

    def _attempt(self, step: int, rank: int) -> PartAttempt:
        settings = self._settings
        return PartAttempt(self._session.events, step, settings.role, rank, settings.lease)

    def _pop_attempt(self, step: int, rank: int) -> PartAttempt | None:
        """Remove and return the rank's attempt at the step, whose last event comes now."""
        attempt = self._attempts.get(rank)
        return self._attempts.pop(rank) if attempt is not None and attempt.step == step else None

    def _free_retired(self) -> None:
        """Free this process's parts of the versions retired since the last call.

        The call also learns which versions are ready. While the log's server is away, training
        goes on, and the parts are freed at a later version.
        """
        try:
            for version in self._ready_versions.retired(self._session.events.log):
                for rank in self._ranks:
                    at = PartRef(self._settings.run_id, version.epoch, version.step, rank)
                    self._session.store.delete(at)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if not is_transient(error):
                raise
            logger.warning(
                "retired versions are not freed yet: the log's server is away (%s)", error
            )

    def _is_stored(self, part: PartRef) -> bool:
        """Return True if readers are sure to find a part: ready, not retired, and stored."""
        if StepRef(part.epoch, part.step) not in self._ready_versions:
            return False
        source = self._session.store.open(part)
        if source is None:
            return False
        source.close()
        return True
