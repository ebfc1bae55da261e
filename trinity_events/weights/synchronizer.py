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
"""Seconds that the log is given to take what was said."""


class Synchronizer(CollectiveGroups):
    """Memory-based weight sync of one run, as one process of it.

    Picklable: what it connects to, it connects to in the process where it is used. Methods are
    synchronous and may be called from any thread, one at a time.

    Args:
        run_id: The run.
        epoch: The epoch of the run that the process belongs to; explorers give 0.
        redis_url: The server of the log; without it ``TRINITY_REDIS_URL``, else the embedded one.
        weights_url: The server of the chunks; without it ``TRINITY_WEIGHTS_REDIS_URL``, else
            beside the embedded server one that keeps no file, and beside another that one itself.
        role: The process's role, in its events.
        rank: The process's rank in that role.
        transport: How its versions travel: over the chunks' server, through this host's shared
            memory, a Ray cluster's object store, a collective group, or the memory of a GPU that
            all of them see. Those who pull follow what the log says of each version.
        chunk_bytes: Largest size of a chunk; by default what is best for the transport.
        group_timeout: Seconds within which a dead peer of a collective group is an error.
        full_every: Versions from one that is published in full to the next, at most; between them
            only what changed travels, where that is less. 1 publishes all in full; more keeps a
            copy of what this process published last.
        tensor_digests: Whether each tensor that it publishes is digested by itself too. Whoever
            applies or loads such a version digests its model's own tensors before it says so.
        dtype: In which it publishes floating-point tensors; by default each in its own.
        lease: Seconds of silence after which a process that publishes is taken for dead.

    Raises ValueError for a transport that there is not.
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
        """Those of ours that we use, for as long as we do."""
        self._log_url: str | None = None
        self._publisher_made: Publisher | None = None
        self._stores = Stores(
            self.run_id, self._connected, f"{self._role}-{self._rank}", self._group_timeout
        )
        self._attempts: dict[int, PartAttempt] = {}
        """By rank."""
        self._ranks: set[int] = set()
        """That published from here."""
        self._standing = ReadyVersions()
        self._last: dict[int, LastPublished] = {}
        self._installed = InstalledBases()
        self._ahead = SpeculativeLoad()
        self._torn = PartialLoads()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        own = ("_servers", "_log_url", "_publisher_made", "_stores", "_attempts", "_ranks")
        for name in (*own, "_standing", "_last", "_installed", "_ahead", "_torn"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._disconnect()

    def bind(self, role: str, rank: int) -> Synchronizer:
        """The same client, speaking as another process."""
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
        """Who this process is in the log."""
        return self._publisher.producer

    def flush(self, deadline: float = FLUSH_DEADLINE) -> None:
        """Wait until all that was said is in the log; calls that say something return before.

        Raises PublishError, which names what the log did not take within ``deadline`` seconds.
        """
        self._publisher.flush(deadline)

    def close(self) -> None:
        """Close the connections; a later call opens them again.

        What it published through shared memory, or a GPU's, is gone then.

        Raises PublishError when the log did not take all that was said.
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
        """Say how this explorer is."""
        self._publisher.publish(event)

    # --- publishing ------------------------------------------------------------------------

    def open_version(self, global_step: int, ranks: Iterable[int] = (0,)) -> None:
        """Say that these ranks will publish a version; one process of the trainer does."""
        self._publisher.publish(
            VersionOpened(step=global_step, ranks=tuple(ranks), transport=self._transport)
        )

    def part_writer(
        self,
        global_step: int,
        rank: int,
        *,
        subset: bool = False,
        dtype: torch.dtype | None = None,
    ) -> PartWriter:
        """A writer of one rank's part, after freeing what is here of retired versions.

        A ``subset`` brings some of the model's tensors, such as an adapter's; others stay.
        Floating-point tensors travel in ``dtype``, by default in the client's.

        The log is told that the rank publishes, and hears that its process is alive until
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
        """Say that a part is whole. ``seconds`` is how long the training loop was held."""
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
        """Publish one rank's part, of a state dict or from an iterator that needs no other rank.

        A ``subset`` brings some of the model's tensors, such as an adapter's: whoever applies it
        keeps the others. Floating-point tensors travel in ``dtype``, such as the one that explorers
        serve in; digests are of what travels. What fails is told to the log and raised; nothing of
        the part is left.
        """
        began = time.monotonic()
        writer: PartWriter | None = None
        try:
            writer = self.part_writer(global_step, rank, subset=subset, dtype=dtype)
            if isinstance(named_tensors, Mapping):
                named_tensors = named_tensors.items()
            for name, tensor in named_tensors:
                writer.add(name, tensor)
            report = writer.seal()
            self.part_published(global_step, rank, report, time.monotonic() - began)
        except BaseException as error:
            self._give_up(global_step, rank, writer, error)
            raise
        return report

    def _give_up(
        self, step: int, rank: int, writer: PartWriter | None, error: BaseException
    ) -> None:
        """Say what failed and take back what was sent, as far as the servers still answer."""
        try:
            self.part_failed(step, rank, error)
        except Exception:
            logger.exception("step %d: that the part failed could not be published", step)
        try:
            if writer is not None:
                writer.discard()
        except Exception:
            logger.exception("step %d: the failed part could not be cleaned up", step)

    def part_failed(self, global_step: int, rank: int, error: BaseException) -> None:
        """Say that a part will not come, and why."""
        attempt = self._taken(global_step, rank) or self._attempt(global_step, rank)
        try:
            self._publisher.publish(attempt.failure(error))
        finally:
            attempt.end()

    def part_given_up(self, rank: int) -> None:
        """Say that what this rank was publishing will not come, where others say why."""
        attempt = self._attempts.pop(rank, None)
        if attempt is not None:
            try:
                error = RuntimeError("it was given up")
                self._publisher.publish(attempt.failure(error, followed=True))
            finally:
                attempt.end()

    def commit(self, global_step: int, metrics: dict[str, float] | None = None) -> None:
        """Say that all parts of the version are under way, or done; the trainer does."""
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
        """Verify a version while it is still being published, where its transport allows that.

        What it is good for is that :meth:`pull`, once the version is announced, has less left to
        do; nothing is promised of a version that is not sealed, and nothing of it is installed.

        A module that nobody serves from may take what comes: then :meth:`load` has next to nothing
        left to do, but until then the module has some of a version that may never be whole. That
        needs to know where bytes belong, from a full version that was loaded or applied before,
        and is of no use for deltas.

        Args:
            epoch: The epoch of the version.
            opened: Which ranks publish it, and how it travels.
            stop: Set by another thread, ends it.
            deadline: Seconds after which it gives up, as when the publisher died.
            into: The module to fill, if any; on the CPU.

        Returns:
            How it ended; None when the transport has nothing that could be read along.
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
        """Hold the version that an announcement names: that one, whole, verified, or an error.

        Its tensors are for reading, and until the block ends. Of some tensors by name, or of a
        box of each, only chunks that hold some of that are read: ``wanted`` says which. What it
        rests on, where it is a delta, is held too, but for the full parts whose manifest digests
        the caller has, and wants whole.

        Raises:
            VersionUnavailable: when it is no longer there; a newer one is, or will be.
            CorruptVersion: when what is there is not what was announced.
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

        Nothing of the module changes before all that is wanted of the version is here, verified
        and known to fit: shards are put together in the module itself. Of a version that is wanted
        in part, the other parameters stay as they are.

        Args:
            module: Where to.
            ready: The announcement.
            wanted: Names, and of each the box that the module's parameter holds, or None for all
                of it; by default the whole version.
            cast: Whether floating-point tensors of another dtype than the module's are converted.
                They are verified as they came; a delta brings what it rests on each time.

        Raises as :meth:`pull`, and IncompatibleWeights.
        """
        began = time.monotonic()
        try:
            return self._apply(module, ready, wanted, self._installed.fulls(module), began, cast)
        except ModelDiffers as differs:
            logger.warning("step %d is taken with all that it rests on: %s", ready.step, differs)
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
        """Say that this process serves a version, which somebody else installed as it was pulled.

        Args:
            version: What it serves, all of it.
            verified_at: When its last byte was verified, Unix seconds.
            phases: How long what took.
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
        """Fill a module that nobody serves from yet, such as a late joiner's, and report it.

        As :meth:`apply`, but with no room for the version: each chunk goes straight to where it
        belongs, and is verified there. So what fails midway leaves the module with some of it:
        nobody may serve from it then before another version is whole. Deltas are applied, and so is
        what brings one tensor of the module under two names: whether they agree is looked at first.
        With ``cast``, a tensor of another dtype than the module's is put together beside it.

        Raises as :meth:`apply`, which like this refuses a version that leaves out some of what a
        version that never became whole may have left its bytes in.
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

    # --- what it stands on -----------------------------------------------------------------

    @contextmanager
    def _telling_refusals(self, ready: StepReady) -> Iterator[None]:
        """Tell the log of a version that is refused in the block."""
        try:
            yield
        except ModelDiffers:  # which says nothing of the version
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
                logger.exception("step %d: that it was refused could not be published", ready.step)
            raise

    def _attempt(self, step: int, rank: int) -> PartAttempt:
        return PartAttempt(self._publisher, step, self._role, rank, self._lease)

    def _taken(self, step: int, rank: int) -> PartAttempt | None:
        """The rank's attempt at the step, which is over with what is said now."""
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
        """Its URL, found when it is first asked for."""
        if self._log_url is None:
            self._log_url = self._servers.enter_context(serving(self._redis_url))
        return self._log_url

    def _connected(self) -> redis.Redis:
        """A client to the server of the chunks."""
        log = self._log_server
        url = self._servers.enter_context(serving_weights(self._weights_url, log))
        return open_client(url, setting=LOG_SERVER if url == log else WEIGHTS_SERVER)

    @property
    def _store(self) -> ChunkStore:
        """Where this process publishes."""
        return self._store_of(self._transport)

    def _store_of(self, transport: str) -> ChunkStore:
        return self._stores.of(transport)

    def _part(self, step: int, rank: int, epoch: int | None = None) -> PartRef:
        return PartRef(self.run_id, self.epoch if epoch is None else epoch, step, rank)

    def _free_retired(self) -> None:
        """Free the parts from here of the versions that the reducer has retired since last time.

        And hear which are ready. While the log's server is away, training goes on, and what is
        said waits for it; what was retired is heard of with a later version.
        """
        try:
            for version in self._standing.retired(self._publisher.log):
                for rank in self._ranks:
                    self._store.delete(self._part(version.step, rank, version.epoch))
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if not is_transient(error):
                raise
            logger.warning("which versions may go is not known: the server is away (%s)", error)

    def _is_lasting(self, part: PartRef) -> bool:
        """Whether readers are sure to find a part: it is ready, not retired, and there."""
        if StepRef(part.epoch, part.step) not in self._standing:
            return False
        source = self._store.open(part)
        if source is None:
            return False
        source.close()
        return True
