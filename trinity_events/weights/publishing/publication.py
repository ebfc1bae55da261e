"""Lifecycle of one rank's part of a version, and of the parts of one process.

::

    new ──begin──> open ──seal──> sealed ──publish──> published
     └─────────────┴──── fail, give_up ──┴───────────────┴───> ended

1. A part that begins has one attempt in the log, and the attempt has one last event.
2. A part is published once, after its manifest is stored.
3. A part that ends has no chunks, although the log may not take the failure.
4. A failure is in the log with its reason, although the part has not begun.
5. Heartbeats last from the attempt's first event until its last is in the log, or counts as lost.
6. A rank has one running part in a process. The next one, and a close, give it up.
7. Retired versions are freed before a part begins, which may take their memory.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self

import redis
import torch

from trinity_schemas import (
    ContractError,
    Probes,
    Slot,
    StepReady,
    StepRef,
    VersionOpened,
    VersionPartPublished,
    VersionRetired,
    decode_envelope,
)

from ...coordinator.save_attempt import SaveAttempt
from ...log import ORIGIN, Publisher
from ...log.publishing.heartbeat import Heartbeat
from ...log.retry import is_transient
from ...replay import announced
from ..deltas.tracker import LastPublished
from ..errors import PartClosed
from ..session import Session
from ..slices import ShardOffset
from ..transports.base import PartRef
from .part_writer import LastLayout, PartWriter, Places, PublishedPartReport

logger = logging.getLogger(__name__)


class Publication:
    """One rank's part of a version, from its first event to its last.

    As a context manager it publishes the part when the block ends. When the block raises, or the
    part cannot be published, it publishes the failure and discards the chunks. The first
    :meth:`add` begins the attempt, unless :meth:`begin` was called before.

    Args:
        publisher: Publisher of the process.
        global_step: Training step, which names the version.
        rank: Rank that publishes the part.
        ranks: Ranks of the version, to open it at the begin; None if another rank opens it.
        subset: The version has only some of the model's tensors, such as an adapter.
        dtype: Floating-point dtype to send in; by default the client's.
        probes: Probes of the version, for one of its ranks.
    """

    def __init__(
        self,
        publisher: VersionPublisher,
        global_step: int,
        rank: int = 0,
        *,
        ranks: Iterable[int] | None = None,
        subset: bool = False,
        dtype: torch.dtype | None = None,
        probes: Probes | None = None,
    ) -> None:
        self.global_step = global_step
        self.rank = rank
        self.stage: Literal["new", "open", "sealed", "published", "ended"] = "new"
        self.report: PublishedPartReport | None = None
        """Summary of the part, once it is sealed."""
        self._publisher = publisher
        self._ranks = ranks
        self._subset = subset
        self._dtype = dtype
        self._probes = probes
        self._attempt = publisher.create_attempt(global_step, rank)
        self._writer: PartWriter | None = None
        # The stall counts from here: a caller gathers tensors before it begins.
        self._created_at = time.monotonic()
        self._running = ExitStack()
        """Heartbeats, and the report of the publication as a wait, if it lasts."""

    @property
    def published(self) -> bool:
        """True once the log received that the part is whole, unless it was taken back."""
        return self.stage == "published"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(error)
        elif self.stage not in ("published", "ended"):
            try:
                self.publish()
            except BaseException as caught:
                self.fail(caught)
                raise

    def begin(self) -> PartWriter:
        """Open the version if ``ranks`` were given, and begin the attempt. Idempotent.

        Raises ValueError if the part has ended.
        """
        if self.stage == "ended":
            raise PartClosed(f"weights of step {self.global_step}")
        if self._writer is None:
            publisher, events = self._publisher, self._publisher.events
            # First: an attempt that is over raises before anything is published.
            begun = self._attempt.begin()
            if self._ranks is not None:
                publisher.open_version(self.global_step, ranks=self._ranks)
            what = f"its part of the weights of step {self.global_step} to be stored"
            self._running.enter_context(events.waits.waiting(what))
            # Before the writer takes memory (invariant 7).
            publisher.replace_running(self)
            self.stage = "open"
            # No wait for the first heartbeat: the start event begins a whole lease.
            beating = Heartbeat.of(events).active(events, publisher.lease, patience=0.0)
            self._running.enter_context(beating)
            # After the heartbeat has begun (invariant 5).
            events.publish(begun)
            self._writer = publisher.create_writer(
                self.global_step,
                self.rank,
                subset=self._subset,
                dtype=self._dtype,
            )
            self._writer.probes = self._probes
        return self._writer

    def add(self, name: str, tensor: torch.Tensor, place: ShardOffset | None = None) -> None:
        """Append a tensor, or a shard of one, as :meth:`PartWriter.add`."""
        self.begin().add(name, tensor, place)

    def add_all(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], places: Places = None
    ) -> None:
        """Append tensors at once, as :meth:`PartWriter.add_all`."""
        self.begin().add_all(names, tensors, places)

    def seal(self) -> PublishedPartReport:
        """Send the rest and the manifest. Idempotent; readers learn of the part by a publish."""
        writer = self.begin()
        if self.report is None:
            self.report, self.stage = writer.seal(), "sealed"
        return self.report

    def publish(self, seconds: float | None = None) -> PublishedPartReport:
        """Seal the part and publish that it is whole. Idempotent.

        Args:
            seconds: Stall of the training loop; by default the age of the publication.
        """
        report = self.seal()
        if self.stage == "sealed":
            stall = time.monotonic() - self._created_at if seconds is None else seconds
            self._publisher.events.publish(
                VersionPartPublished(
                    step=self.global_step,
                    rank=self.rank,
                    manifest_digest=report.manifest_digest,
                    bytes=report.bytes,
                    tensors=report.tensors,
                    chunks=report.chunks,
                    seconds=stall,
                    delta=report.delta,
                    save_id=self._attempt.save_id,
                )
            )
            self.stage = "published"
            self._publisher.remove_running(self)
            self._running.close()
        return report

    def fail(self, error: BaseException) -> None:
        """Publish the failure and discard the chunks, as far as the servers answer. Idempotent."""
        if self.stage == "published":  # the published attempt is over
            self._attempt = self._publisher.create_attempt(self.global_step, self.rank)
        if self._attempt.stage == "new":
            self._attempt.begin()  # not published: the failure alone is in the log
        self._end(error)

    def give_up(self, *, discard: bool = True) -> None:
        """End the part as :meth:`fail`, because of another rank, whose event has the reason.

        Args:
            discard: Delete the chunks; False where the store deletes them, as it is closed.
        """
        reason = RuntimeError("it was given up") if self.stage in ("open", "sealed") else None
        self._end(reason, followed=True, discard=discard)

    def _end(
        self, error: BaseException | None, *, followed: bool = False, discard: bool = True
    ) -> None:
        if self.stage == "ended":
            return
        # First, so that an error below does not end the part a second time.
        self.stage = "ended"
        self._publisher.remove_running(self)
        try:
            with self._running:
                if error is not None:
                    self._publisher.events.publish(self._attempt.fail(error, followed=followed))
        # Invariant 3: the chunks are removed although the log cannot be told.
        except Exception:
            logger.exception(
                "step %d: the failure of the part could not be published", self.global_step
            )
        try:
            if discard and self._writer is not None:
                self._writer.discard()
        except Exception:
            logger.exception(
                "step %d: the chunks of the failed part stay until they expire", self.global_step
            )


class ModelUpdateGroup:
    """Sender of one version through a collective group, tensor by tensor, and of its events.

    ``fsdp_sync_weight_nccl`` and ``megatron_sync_weight_nccl`` take it on rank 0.
    """

    def __init__(self, part: Publication) -> None:
        self._part = part

    @property
    def global_step(self) -> int:
        """Training step, which names the version."""
        return self._part.global_step

    @property
    def report(self) -> PublishedPartReport | None:
        """Summary of the version, once it is sealed."""
        return self._part.report

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Send a tensor, in buckets. Raises GroupBroken."""
        self._part.add(name, tensor)

    def seal(self) -> None:
        """Send the rest and the manifest; every explorer has all of it when this returns."""
        self._part.publish()

    def fail(self, error: BaseException) -> None:
        """Publish that the version failed, to the explorers and to the log."""
        self._part.fail(error)


class VersionPublisher:
    """Parts of versions of one process: those that run, and what a version leaves for the next.

    Args:
        session: Connections that it publishes through.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._settings = session.settings
        self._running: dict[int, Publication] = {}
        """Running parts by rank."""
        self._ranks: set[int] = set()
        """Ranks that published from this process."""
        self._read_through = ORIGIN
        self._ready: set[StepRef] = set()
        """Versions that were announced ready and are not retired, as of the last read."""
        self._last: dict[int, LastPublished] = {}
        self._last_layouts: dict[int, LastLayout] = {}

    @property
    def events(self) -> Publisher:
        """Publisher of this process's events."""
        return self._session.events

    @property
    def lease(self) -> float:
        """Seconds without a heartbeat after which the process is taken for dead."""
        return self._settings.lease

    def open_version(self, global_step: int, ranks: Iterable[int]) -> None:
        """Publish that these ranks will publish a version."""
        transport = self._settings.transport
        self.events.publish(
            VersionOpened(step=global_step, ranks=tuple(ranks), transport=transport)
        )

    def create_attempt(self, step: int, rank: int) -> SaveAttempt:
        """Return a new attempt of a rank at its part of a version."""
        slot = Slot(step=step, kind="weights", role=self._settings.role, rank=rank, name="part")
        return SaveAttempt(secrets.token_hex(8), slot, lease=self.lease)

    def replace_running(self, part: Publication) -> None:
        """Free retired versions, give up the rank's earlier part, and record the one that runs."""
        self._ranks.add(part.rank)
        self._free_retired()
        if part.rank in self._running:
            self._running[part.rank].give_up()
        self._running[part.rank] = part

    def remove_running(self, part: Publication) -> None:
        """Remove a part whose last event is published."""
        if self._running.get(part.rank) is part:
            del self._running[part.rank]

    def create_writer(
        self,
        global_step: int,
        rank: int,
        *,
        subset: bool,
        dtype: torch.dtype | None,
    ) -> PartWriter:
        """Return a writer of one rank's part, which rests on the rank's last one if it may."""
        settings = self._settings
        part, last = PartRef(settings.run_id, settings.epoch, global_step, rank), None
        if settings.full_every > 1 and not subset:
            last = self._last.setdefault(rank, LastPublished(settings.full_every))
            # A subset has no deltas: its next version may have other tensors.
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

    def give_up(self) -> None:
        """Publish that all ranks of this process gave up their running parts.

        Their chunks are left to the store, which is closed next: a thread may be adding some.
        """
        # A copy, because give_up removes its part.
        for part in list(self._running.values()):
            part.give_up(discard=False)

    def _free_retired(self) -> None:
        """Free this process's parts of the versions retired since the last call.

        The call also learns which versions are ready. While the log's server is away, training
        continues, and the parts are freed at a later version.
        """
        try:
            # Only the process that published can free its memory; the fold just announces (decision
            # 14).
            for entry in announced(self.events.log, self._read_through):
                try:
                    event: object = decode_envelope(entry.payload).event
                except ContractError:
                    event = None  # of a later contract
                if isinstance(event, VersionRetired):
                    for rank in self._ranks:
                        at = PartRef(self._settings.run_id, event.epoch, event.step, rank)
                        self._session.store.delete(at)
                    self._ready.discard(StepRef(event.epoch, event.step))
                elif isinstance(event, StepReady) and event.kind == "weights":
                    self._ready.add(StepRef(event.epoch, event.step))
                # After the deletion: a failure midway begins again with this entry.
                self._read_through = entry.id
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if not is_transient(error):
                raise
            logger.warning(
                "retired versions are not freed yet: the log's server is away (%s)", error
            )

    def _is_stored(self, part: PartRef) -> bool:
        """Return True if readers are sure to find a part: ready, not retired, and stored."""
        # Readers are sure to find only what was announced.
        if StepRef(part.epoch, part.step) not in self._ready:
            return False
        source = self._session.store.open(part)
        if source is None:
            return False
        source.close()
        return True
