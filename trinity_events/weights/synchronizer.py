"""The client through which trainers publish weight versions and explorers pull them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import redis
import torch

from trinity_schemas import (
    AppliedPhases,
    ExplorerStatusChanged,
    Producer,
    StepCommitted,
    StepReady,
    StepRef,
    VersionOpened,
    VersionPartPublished,
    VersionRefused,
    WeightsApplied,
)

from ..coordinator import LEASE
from ..core.limits import LONGEST_REASON
from ..error_text import message_of
from ..errors import CorruptVersion
from ..log import Publisher, SyncEventLog, new_producer
from ..log.retry import is_transient
from ..server import LOG_SERVER, WEIGHTS_SERVER, open_client, serving, serving_weights
from .compatibility import is_cast, targets_of
from .deltas.apply import InstalledBases, ModelDiffers
from .deltas.tracker import LastPublished
from .install import check_fit, install
from .load import BaseRequired, load_version
from .part_attempt import PartAttempt
from .partial_loads import PartialLoads
from .publication import Publication
from .publish import PartWriter, PublishedPartReport
from .pull import pull_version
from .pulled_version import PulledVersion, Selection
from .ready_versions import ReadyVersions
from .speculative_load import SpeculativeLoad
from .transports.base import ChunkStore, Ended, PartRef, SupportsPrefetch
from .transports.collective import TIMEOUT, CollectiveGroups
from .transports.redis.store import RedisChunkStore
from .transports.stores import Stores, TransportName
from .verify_model import check_installed

logger = logging.getLogger(__name__)

FLUSH_DEADLINE = 10.0
"""Seconds that ``flush`` waits for the log to accept the published events."""


class Synchronizer(CollectiveGroups):
    """Client of one process of a run, for memory-based weight sync.

    Picklable: it connects to its servers in the process where it is used. Methods are synchronous
    and may be called from any thread, one at a time.

    Args:
        run_id: The run.
        epoch: Epoch of the run that the process belongs to; explorers give 0.
        redis_url: Server of the log; by default ``TRINITY_REDIS_URL``, else the embedded server.
        weights_url: Server of the chunks; by default ``TRINITY_WEIGHTS_REDIS_URL``, else the
            server of the log. The embedded server has a second one without files for them.
        role: Role of the process in its events.
        rank: Rank of the process in that role.
        transport: Transport of the versions that it publishes: the server of the chunks, this
            host's shared memory, a Ray cluster's object store, a collective group, or the memory
            of a GPU that all processes see. Readers follow the log's record of each version.
        chunk_bytes: Largest size of a chunk; by default the transport's choice.
        group_timeout: Seconds after which a silent peer of a collective group is an error.
        full_every: Maximum number of versions from one full version to the next; between them
            deltas are sent if they are smaller. 1 publishes every version in full; more keeps a
            copy of the last published version.
        tensor_digests: Publish a digest of each tensor too. A reader that applies or loads such a
            version digests its model's own tensors before it reports the version.
        dtype: Floating-point dtype to publish in; by default each tensor keeps its own.
        lease: Seconds without a heartbeat after which a publisher is taken for dead.

    Raises ValueError for an unknown transport.
    """

    def __init__(
        self,
        run_id: str,
        epoch: int,
        *,
        redis_url: str | None = None,
        weights_url: str | None = None,
        role: str = "trainer",
        rank: int = 0,
        transport: TransportName = "redis",
        chunk_bytes: int | None = None,
        group_timeout: float = TIMEOUT,
        full_every: int = 1,
        tensor_digests: bool = False,
        dtype: torch.dtype | None = None,
        lease: float = LEASE,
    ) -> None:
        if transport not in get_args(TransportName):
            raise ValueError(
                f"there is no transport {transport!r}: {', '.join(get_args(TransportName))}"
            )
        self.run_id = run_id
        self.epoch = epoch
        self._redis_url = redis_url
        self._weights_url = weights_url
        self._role = role
        self._rank = rank
        self._transport = transport
        self._chunk_bytes = chunk_bytes
        self._group_timeout = group_timeout
        self._full_every = full_every
        self._tensor_digests = tensor_digests
        self._dtype = dtype
        self._lease = lease
        self._disconnect()

    def _disconnect(self) -> None:
        self._servers = ExitStack()
        """Embedded servers in use."""
        self._log_url: str | None = None
        self._publisher_made: Publisher | None = None
        self._stores = Stores(
            self.run_id, self._connected, f"{self._role}-{self._rank}", self._group_timeout
        )
        self._attempts: dict[int, PartAttempt] = {}
        """Running attempts by rank."""
        self._ranks: set[int] = set()
        """Ranks that published from this process."""
        self._ready_versions = ReadyVersions()
        self._last: dict[int, LastPublished] = {}
        self._installed = InstalledBases()
        self._ahead = SpeculativeLoad()
        self._torn = PartialLoads()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        own = ("_servers", "_log_url", "_publisher_made", "_stores", "_attempts", "_ranks")
        for name in (*own, "_ready_versions", "_last", "_installed", "_ahead", "_torn"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._disconnect()

    def bind(self, role: str, rank: int) -> Synchronizer:
        """Return the same client with the role and the rank of another process."""
        return Synchronizer(
            self.run_id,
            self.epoch,
            redis_url=self._redis_url,
            weights_url=self._weights_url,
            role=role,
            rank=rank,
            transport=self._transport,
            chunk_bytes=self._chunk_bytes,
            group_timeout=self._group_timeout,
            full_every=self._full_every,
            tensor_digests=self._tensor_digests,
            dtype=self._dtype,
            lease=self._lease,
        )

    @property
    def producer(self) -> Producer:
        """Producer of this process's events."""
        return self._publisher.producer

    def flush(self, deadline: float = FLUSH_DEADLINE) -> None:
        """Wait until all published events are in the log; other methods do not wait.

        Raises PublishError, which names the events not accepted within ``deadline`` seconds.
        """
        self._publisher.flush(deadline)

    def close(self) -> None:
        """Close the connections; a later call opens them again.

        Versions published through shared memory, or GPU memory, are freed.

        Raises PublishError when the log did not accept all events.
        """
        publisher, stores, servers = self._publisher_made, self._stores, self._servers
        for rank in list(self._attempts):
            self.part_given_up(rank)
        self._disconnect()
        with servers:
            try:
                if publisher is not None:
                    publisher.close()
            finally:
                if publisher is not None:
                    publisher.log.close()
                stores.close()

    def tell(self, event: ExplorerStatusChanged) -> None:
        """Publish the status of this explorer."""
        self._publisher.publish(event)

    # --- publishing ------------------------------------------------------------------------

    def open_version(self, global_step: int, ranks: Iterable[int] = (0,)) -> None:
        """Publish that these ranks will publish a version. Called by one rank of the trainer."""
        self._publisher.publish(
            VersionOpened(step=global_step, ranks=tuple(ranks), transport=self._transport)
        )

    def publication(
        self,
        global_step: int,
        rank: int = 0,
        *,
        ranks: Iterable[int] | None = None,
        subset: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Publication:
        """Return one rank's part of a version, to be used in a ``with`` block.

        Tensors are added one by one. The part is published when the block ends; a block that raises
        publishes the failure and discards the part. With ``ranks`` it opens the version too, as
        :meth:`open_version`. ``subset`` and ``dtype`` are those of :meth:`part_writer`.
        """
        return Publication(self, global_step, rank, ranks=ranks, subset=subset, dtype=dtype)

    def part_writer(
        self,
        global_step: int,
        rank: int,
        *,
        subset: bool = False,
        dtype: torch.dtype | None = None,
    ) -> PartWriter:
        """Return a writer of one rank's part, after freeing this process's retired versions.

        A ``subset`` has some of the model's tensors, such as an adapter's; others stay as they are.
        Floating-point tensors are sent in ``dtype``, by default the client's.

        This publishes the start of the attempt, and sends heartbeats until
        :meth:`part_published`, :meth:`part_failed` or :meth:`part_given_up`.
        """
        self._ranks.add(rank)
        self._free_retired()
        self.part_given_up(rank)
        self._attempts[rank] = attempt = self._attempt(global_step, rank)
        attempt.begin()
        part, last = self._part(global_step, rank), None
        if self._full_every > 1 and not subset:
            last = self._last.setdefault(rank, LastPublished(self._full_every))
            last.begin(part, self._is_lasting)
        return PartWriter(
            self._store,
            part,
            self._chunk_bytes,
            subset=subset,
            last=last,
            tensor_digests=self._tensor_digests,
            dtype=dtype or self._dtype,
        )

    def part_published(
        self, global_step: int, rank: int, report: PublishedPartReport, seconds: float
    ) -> None:
        """Publish that a part is whole. ``seconds`` is the stall of the training loop."""
        attempt = self._taken(global_step, rank)
        try:
            self._publisher.publish(
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

    def publish(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
        global_step: int,
        rank: int = 0,
        *,
        subset: bool = False,
        dtype: torch.dtype | None = None,
    ) -> PublishedPartReport:
        """Publish one rank's part from a state dict, or from an iterator without collectives.

        A ``subset`` has some of the model's tensors, such as an adapter's; readers keep the others.
        Floating-point tensors are sent in ``dtype``, such as the dtype that explorers serve in;
        digests are of the bytes sent. A failure is published and raised, and the part discarded.
        """
        if isinstance(named_tensors, Mapping):
            named_tensors = named_tensors.items()
        with self.publication(global_step, rank, subset=subset, dtype=dtype) as part:
            part.begin()
            for name, tensor in named_tensors:
                part.add(name, tensor)
            return part.publish()

    def part_failed(self, global_step: int, rank: int, error: BaseException) -> None:
        """Publish that a part failed, with the reason."""
        attempt = self._taken(global_step, rank) or self._attempt(global_step, rank)
        try:
            self._publisher.publish(attempt.failure(error))
        finally:
            attempt.end()

    def part_given_up(self, rank: int) -> None:
        """Publish that the rank gave up its part; another rank's event has the reason."""
        attempt = self._attempts.pop(rank, None)
        if attempt is not None:
            try:
                error = RuntimeError("it was given up")
                self._publisher.publish(attempt.failure(error, followed=True))
            finally:
                attempt.end()

    def commit(self, global_step: int, metrics: dict[str, float] | None = None) -> None:
        """Publish that all parts of the version are dispatched. Called by the trainer."""
        self._publisher.publish(
            StepCommitted(step=global_step, kind="weights", metrics=metrics or {})
        )

    # --- pulling ---------------------------------------------------------------------------

    def prefetch(
        self,
        epoch: int,
        opened: VersionOpened,
        stop: threading.Event,
        deadline: float,
        into: torch.nn.Module | None = None,
    ) -> Ended | None:
        """Verify a version while it is still being published, if its transport supports that.

        A :meth:`pull` after the announcement then has less left to do. The version is not sealed
        yet, and is not installed.

        An idle module may be filled at the same time, so that :meth:`load` has next to nothing
        left to do. Until that load, the module may hold bytes of a version that never becomes
        whole. The layout comes from a full version that was loaded or applied before; deltas
        cannot be written so.

        Args:
            epoch: Epoch of the version.
            opened: Event that opened the version, with its ranks and its transport.
            stop: Ends the prefetch when another thread sets it.
            deadline: Seconds after which the prefetch ends, such as when the publisher died.
            into: Idle module on the CPU to fill, if any.

        Returns:
            How the prefetch ended; None if the transport does not support it.
        """
        store = self._store_of(opened.transport)
        if not isinstance(store, SupportsPrefetch):
            return None
        parts = [self._part(opened.step, rank, epoch) for rank in opened.ranks]
        self._ahead.abandon()
        taker = None if into is None else self._ahead.begin(into)
        if taker is not None:
            self._installed.forget()
        try:
            return store.prefetch(parts, stop, deadline, taker)
        finally:
            if into is not None:
                self._torn.add(into, self._ahead.took)

    @contextmanager
    def pull(
        self, ready: StepReady, wanted: Selection | None = None, have: Collection[str] = ()
    ) -> Iterator[PulledVersion]:
        """Hold exactly the announced version, whole and verified, until the block ends.

        Its tensors are read-only. ``wanted`` selects tensors by name, or a slice of each; only
        chunks that contain them are read. The base of a delta is held too, except the full parts
        whose manifest digests are in ``have``.

        Raises:
            VersionUnavailable: when the version is gone; a newer one is ready, or will be.
            CorruptVersion: when the stored bytes are not those announced.
        """
        self._ahead.abandon()
        store = self._store_of(ready.transport or RedisChunkStore.name)
        with (
            self._telling_refusals(ready),
            pull_version(store, self.run_id, ready, wanted, have) as version,
        ):
            yield version

    def apply(
        self,
        module: torch.nn.Module,
        ready: StepReady,
        wanted: Selection | None = None,
        *,
        cast: bool = False,
    ) -> AppliedPhases:
        """Pull a version, install it in the module in place, and report it.

        The module changes only once all selected tensors are here, verified and known to fit.
        Shards are assembled in the module itself. Parameters outside the selection stay as they
        are.

        Args:
            module: The module to update.
            ready: The announcement.
            wanted: Selected names, each with the slice that the module's parameter holds, or None
                for the whole tensor; by default the whole version.
            cast: Convert floating-point tensors of another dtype than the module's. They are
                verified before the conversion; a delta is pulled with its base each time.

        Raises as :meth:`pull`, and IncompatibleWeights.
        """
        began = time.monotonic()
        try:
            return self._apply(module, ready, wanted, self._installed.fulls(module), began, cast)
        except ModelDiffers as differs:
            logger.warning(
                "step %d: pulling the version again with its base: %s", ready.step, differs
            )
            return self._apply(module, ready, wanted, (), began, cast)

    def _apply(
        self,
        module: torch.nn.Module,
        ready: StepReady,
        wanted: Selection | None,
        have: Collection[str],
        began: float,
        cast: bool,
    ) -> AppliedPhases:
        with self.pull(ready, wanted, have) as version:
            verified_at = time.time()
            manifests = [manifest for manifest, _ in version.parts]
            fit, names = check_fit(module, version, cast=cast), version.names
            fetched = time.monotonic()
            self._installed.forget()
            with self._torn.until_whole(module, names):
                install(fit)
                check_installed(module, manifests, wanted, cast=cast)
            if cast and is_cast(targets_of(module), manifests):
                self._ahead.forget()
            elif wanted is None:
                self._installed.note(module, ready, version)
                self._ahead.note(module, manifests)
        phases = AppliedPhases(fetch=fetched - began, pause=time.monotonic() - fetched)
        self.applied(version, verified_at, phases)
        return phases

    def applied(self, version: PulledVersion, verified_at: float, phases: AppliedPhases) -> None:
        """Publish that this process serves a pulled version, which other code installed whole.

        Args:
            version: The version.
            verified_at: Unix time in seconds at which the last byte was verified.
            phases: Seconds of each phase.
        """
        self._publisher.publish(
            WeightsApplied(
                version=version.ref,
                digest=version.digest,
                bytes=version.bytes,
                verified_at=verified_at,
                phases=phases,
            )
        )

    def load(
        self,
        module: torch.nn.Module,
        ready: StepReady,
        wanted: Selection | None = None,
        *,
        cast: bool = False,
    ) -> AppliedPhases:
        """Fill an idle module, such as a late joiner's, and report the version.

        As :meth:`apply`, but without memory for the version: each chunk is copied straight into
        the module, and is verified there. After a failure midway the module must not serve before
        another version is whole. Deltas are applied by :meth:`apply`, as is a version that brings
        one tensor of the module under two names, which must be compared first. With ``cast``, a
        tensor of another dtype than the module's is assembled beside it.

        Raises as :meth:`apply`. Both refuse a version that leaves out a tensor that an interrupted
        load may have partially overwritten.
        """
        began = time.monotonic()
        store = self._store_of(ready.transport or RedisChunkStore.name)
        self._installed.forget()
        try:
            with self._telling_refusals(ready):
                parts = load_version(
                    store, self.run_id, ready, module, wanted, self._ahead, self._torn, cast=cast
                )
        except BaseRequired:
            return self.apply(module, ready, wanted, cast=cast)
        finally:
            self._ahead.abandon()
        if cast and is_cast(targets_of(module), parts):
            self._ahead.forget()
        elif wanted is None:
            self._ahead.note(module, parts)
        assert ready.version_digest is not None
        phases = AppliedPhases(fetch=0.0, pause=time.monotonic() - began)
        self._publisher.publish(
            WeightsApplied(
                version=StepRef(ready.epoch, ready.step),
                digest=ready.version_digest,
                bytes=sum(manifest.nbytes for manifest in parts),
                verified_at=time.time(),
                phases=phases,
            )
        )
        return phases

    # --- connections and attempts ----------------------------------------------------------

    @contextmanager
    def _telling_refusals(self, ready: StepReady) -> Iterator[None]:
        """Publish a refusal if the block finds the version corrupt."""
        try:
            yield
        except ModelDiffers:  # the fault is in the model, not in the version
            raise
        except CorruptVersion as error:
            event = VersionRefused(
                version=StepRef(ready.epoch, ready.step),
                rank=error.rank,
                chunk=error.chunk,
                reason=message_of(error)[:LONGEST_REASON],
            )
            try:
                self._publisher.publish(event)
            except Exception:
                logger.exception("step %d: the refusal could not be published", ready.step)
            raise

    def _attempt(self, step: int, rank: int) -> PartAttempt:
        return PartAttempt(self._publisher, step, self._role, rank, self._lease)

    def _taken(self, step: int, rank: int) -> PartAttempt | None:
        """Remove and return the rank's attempt at the step, whose last event comes now."""
        attempt = self._attempts.get(rank)
        return self._attempts.pop(rank) if attempt is not None and attempt.step == step else None

    @property
    def _publisher(self) -> Publisher:
        if self._publisher_made is None:
            log = SyncEventLog(open_client(self._log_server), self.run_id)
            producer = new_producer(self._role, self._rank)
            self._publisher_made = Publisher(log, self.epoch, producer)
        return self._publisher_made

    @property
    def _log_server(self) -> str:
        """URL of the log's server, resolved at first use."""
        if self._log_url is None:
            self._log_url = self._servers.enter_context(serving(self._redis_url))
        return self._log_url

    def _connected(self) -> redis.Redis:
        """Connect to the server of the chunks."""
        log = self._log_server
        url = self._servers.enter_context(serving_weights(self._weights_url, log))
        return open_client(url, setting=LOG_SERVER if url == log else WEIGHTS_SERVER)

    @property
    def _store(self) -> ChunkStore:
        """Store that this process publishes to."""
        return self._store_of(self._transport)

    def _store_of(self, transport: str) -> ChunkStore:
        return self._stores.of(transport)

    def _part(self, step: int, rank: int, epoch: int | None = None) -> PartRef:
        return PartRef(self.run_id, self.epoch if epoch is None else epoch, step, rank)

    def _free_retired(self) -> None:
        """Free this process's parts of the versions retired since the last call.

        The call also learns which versions are ready. While the log's server is away, training
        goes on, and the parts are freed at a later version.
        """
        try:
            for version in self._ready_versions.retired(self._publisher.log):
                for rank in self._ranks:
                    self._store.delete(self._part(version.step, rank, version.epoch))
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if not is_transient(error):
                raise
            logger.warning(
                "retired versions are not freed yet: the log's server is away (%s)", error
            )

    def _is_lasting(self, part: PartRef) -> bool:
        """Return True if readers are sure to find a part: ready, not retired, and stored."""
        if StepRef(part.epoch, part.step) not in self._ready_versions:
            return False
        source = self._store.open(part)
        if source is None:
            return False
        source.close()
        return True
