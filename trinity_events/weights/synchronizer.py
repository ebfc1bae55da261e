"""The client through which trainers publish weight versions and explorers pull them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from msgspec.structs import asdict, replace
from typing_extensions import deprecated

from trinity_schemas import (
    AppliedPhases,
    ExplorerStatusChanged,
    PauseMode,
    PhasesMeasured,
    Probes,
    Producer,
    PublicationStarted,
    RewardErrorReported,
    StepReady,
    StepRef,
    SyncRequested,
    TransportName,
    VersionOpened,
    WeightsProof,
)

from ..client import blocking
from ..coordinator import LEASE
from ..diagnostics.waits import WaitReporter
from ..errors import CorruptVersion, ProofTooWeak, VersionUnavailable
from ..log import DEADLINE, STATUS_LEASE, commit_version, renewing_explorer_lease
from .applying.verify_model import ALL_COMPARED, InstallChecks
from .compatibility import unwrapped_names
from .pauses import Pause, publish_pause
from .publishing.part_writer import PublishedPartReport
from .publishing.publication import ModelUpdateGroup, Publication, VersionPublisher
from .reading.pull import PulledVersion, Selection
from .session import Session
from .settings import SynchronizerSettings
from .tensors import sent_dtype
from .transports.base import Ended
from .transports.collective import TIMEOUT, WeightSyncInfo
from .version_reader import AnyVersion, VersionReader


class Synchronizer:
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
        deadline: Seconds for which it waits for a server that is away: for that of the log in
            :meth:`flush`, and for that of the chunks as it publishes and reads.
        checkpoint_folder: The run's checkpoint directory, for versions that are ready state dicts:
            :meth:`pull`, :meth:`apply` and :meth:`load` take their announcements too.

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
        deadline: float = DEADLINE,
        checkpoint_folder: Path | None = None,
    ) -> None:
        self._open(
            SynchronizerSettings(
                run_id=run_id,
                epoch=epoch,
                redis_url=redis_url,
                weights_url=weights_url,
                role=role,
                rank=rank,
                transport=transport,
                chunk_bytes=chunk_bytes,
                group_timeout=group_timeout,
                full_every=full_every,
                tensor_digests=tensor_digests,
                dtype=dtype,
                lease=lease,
                deadline=deadline,
                checkpoint_folder=checkpoint_folder,
            )
        )

    def _open(self, settings: SynchronizerSettings) -> None:
        self.settings = settings
        self._session = Session(settings)
        self._publisher = VersionPublisher(self._session)
        self._reader = VersionReader(self._session)
        self._status = ExplorerStatusChanged(status="running")
        """Last status that it reported."""

    def __getstate__(self) -> SynchronizerSettings:
        return self.settings

    def __setstate__(self, settings: SynchronizerSettings) -> None:
        self._open(settings)

    def bind(self, role: str, rank: int) -> Synchronizer:
        """Return the same client with the role and the rank of another process."""
        return Synchronizer(**asdict(replace(self.settings, role=role, rank=rank)))

    @property
    def run_id(self) -> str:
        """The run."""
        return self.settings.run_id

    @property
    def epoch(self) -> int:
        """Epoch of the run that the process belongs to; 0 in an explorer."""
        return self.settings.epoch

    @property
    def producer(self) -> Producer:
        """Producer of this process's events."""
        return self._session.events.producer

    @property
    def waits(self) -> WaitReporter:
        """Reporter of this process's long waits, such as an explorer's for a version."""
        return self._session.events.waits

    def flush(self, deadline: float | None = None) -> None:
        """Wait until all published events are in the log; other methods do not wait.

        Raises PublishError, which names the events not accepted within ``deadline`` seconds, by
        default those of the synchronizer.
        """
        self._session.events.flush(deadline)

    def close(self) -> None:
        """Close the connections; a later call opens them again.

        Versions published through shared memory, or GPU memory, are freed.

        Raises PublishError when the log did not accept all events.
        """
        # While the log is open: it says that the running parts were given up.
        self._publisher.give_up()
        session = self._session
        # Before the close, which may raise: the client stays usable.
        self._open(self.settings)
        session.close()

    def report(
        self,
        event: ExplorerStatusChanged | SyncRequested | RewardErrorReported | PhasesMeasured,
    ) -> None:
        """Publish this explorer's status, request for weights, phases, or the error of a reward."""
        if isinstance(event, ExplorerStatusChanged):
            self._status = event
        self._session.events.publish(event)

    def renewing_explorer_lease(
        self, *, lease: float = STATUS_LEASE
    ) -> AbstractContextManager[None]:
        """Report that this explorer runs, and renew its lease, for the block.

        Its end reports that the explorer stopped.

        Args:
            lease: Seconds without a heartbeat after which the explorer is lost.
        """
        self._status = ExplorerStatusChanged(status="running")
        return renewing_explorer_lease(self._session.events, lambda: self._status, lease=lease)

    @deprecated("Synchronizer.tell is called report")
    def tell(self, event: ExplorerStatusChanged | SyncRequested | RewardErrorReported) -> None:
        """Publish as :meth:`report`."""
        self.report(event)

    # --- publishing ------------------------------------------------------------------------

    def open_version(self, global_step: int, ranks: Iterable[int] = (0,)) -> None:
        """Publish that these ranks will publish a version. Called by one rank of the trainer."""
        self._publisher.open_version(global_step, ranks)

    def publication(
        self,
        global_step: int,
        rank: int = 0,
        *,
        ranks: Iterable[int] | None = None,
        subset: bool = False,
        dtype: torch.dtype | None = None,
        probes: Probes | None = None,
    ) -> Publication:
        """Return one rank's part of a version, to be used in a ``with`` block.

        Tensors are added one by one. The part is published when the block ends; a block that raises
        publishes the failure and discards the part. With ``ranks`` it opens the version too, as
        :meth:`open_version`. ``subset``, ``dtype`` and ``probes`` are those of :meth:`publish`.
        """
        return Publication(
            self._publisher,
            global_step,
            rank,
            ranks=ranks,
            subset=subset,
            dtype=dtype,
            probes=probes,
        )

    def publish(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
        global_step: int,
        rank: int = 0,
        *,
        subset: bool = False,
        dtype: torch.dtype | None = None,
        probes: Probes | None = None,
    ) -> PublishedPartReport:
        """Publish one rank's part from a state dict, or from an iterator without collectives.

        A ``subset`` has some of the model's tensors, such as an adapter's; readers keep the others.
        Floating-point tensors are sent in ``dtype``, such as the dtype that explorers serve in;
        digests are of the bytes sent. A failure is published and raised, and the part discarded.
        ``probes`` are of the whole version, of its bytes as they are sent, and sealed by one rank:
        :func:`trinity_schemas.make_probes` makes them.

        Tensors are published under plain names: prefixes that torch.compile, FSDP, activation
        checkpointing and (in a state dict) DistributedDataParallel add to names are removed.
        """
        publication = self.publication(global_step, rank, subset=subset, dtype=dtype, probes=probes)
        with publication as part:
            part.begin()
            if isinstance(named_tensors, Mapping):
                # The names of a subset do not show what its model is wrapped in.
                names = list(named_tensors) if subset else unwrapped_names(named_tensors)
                part.add_all(names, list(named_tensors.values()))
            else:
                for name, tensor in named_tensors:
                    part.add(name, tensor)
            return part.publish()

    def published_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which tensors of a dtype are published by default."""
        return sent_dtype(dtype, self._session.settings.dtype)

    def commit(self, global_step: int, metrics: Mapping[str, object] | None = None) -> None:
        """Publish that all parts of the version are dispatched. Called by the trainer.

        Metrics are numbers of Python, NumPy or torch.

        Raises:
            MetricRefused: A metric is no number. The version is committed, without it.
        """
        commit_version(self._session.events, global_step, metrics)

    # --- pulling ---------------------------------------------------------------------------

    def prefetch(
        self,
        epoch: int,
        opened: VersionOpened | PublicationStarted,
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
        return self._reader.prefetch(epoch, opened, stop, deadline, into)

    def pull(
        self, ready: StepReady, selection: Selection | None = None, have: Collection[str] = ()
    ) -> AbstractContextManager[PulledVersion]:
        """Hold exactly the announced version, whole and verified, until the block ends.

        Its tensors are read-only. ``selection`` selects tensors by name, or a slice of each; only
        chunks that contain them are read. The base of a delta is held too, except the full parts
        whose manifest digests are in ``have``.

        Raises:
            VersionUnavailable: when the version is gone; a newer one is ready, or will be.
            CorruptVersion: when the stored bytes are not those announced.
        """
        return self._reader.pull(ready, selection, have)

    def apply(
        self,
        module: torch.nn.Module,
        ready: StepReady,
        selection: Selection | None = None,
        *,
        cast: bool = False,
        install_context: Callable[[], AbstractContextManager[object]] = nullcontext,
        checks: InstallChecks = ALL_COMPARED,
    ) -> AppliedPhases:
        """Pull a version, install it in the module in place, and report it.

        The module changes only once all selected tensors are here, verified and known to fit.
        Shards are assembled in the module itself. Parameters outside the selection stay as they
        are.

        Args:
            module: The module to update.
            ready: The announcement.
            selection: Selected names, each with the slice that the module's parameter holds, or
                None for the whole tensor; by default the whole version.
            cast: Convert floating-point tensors of another dtype than the module's. They are
                verified before the conversion; a delta is pulled with its base each time.
            install_context: Makes the context in which the module changes, such as one that holds
                an engine still. Bytes are pulled and verified before it is entered.
            checks: Checks of the filled module, within that context.

        Raises as :meth:`pull`, and IncompatibleWeights. What the checks raise leaves a module that
        must not serve before another version is whole.
        """
        return self._reader.apply(
            module, ready, selection, cast=cast, install_context=install_context, checks=checks
        )

    def follow(
        self, module: torch.nn.Module, *, deadline: float | None = None, cast: bool = False
    ) -> Iterator[tuple[StepReady, AppliedPhases]]:
        """Install each version that becomes ready, from the present one on; yield it once applied.

        It waits for a run that is not open yet. A version that was retired before it was pulled is
        left out: a newer one is announced.

        Args:
            module: The module to update.
            deadline: Seconds to wait for an announcement; without it, for ever.
            cast: As :meth:`apply`.

        Raises as :meth:`apply`, and DeadlineExceeded.
        """
        announced = blocking.subscribe(
            self.run_id,
            StepReady,
            deadline=deadline,
            wait_for_run=True,
            redis_url=self.settings.redis_url,
        )
        with announced as events:
            for event in events:
                # Checkpoints and state dicts of the run are announced on the same stream.
                if event.kind != "weights":
                    continue
                try:
                    phases = self.apply(module, event.event, cast=cast)
                # A slow reader: the version was retired, so that a newer one is ready or comes.
                except VersionUnavailable:
                    continue
                yield event.event, phases

    def applied(
        self,
        version: AnyVersion,
        verified_at: float,
        phases: AppliedPhases,
        proof: WeightsProof | None = None,
    ) -> None:
        """Publish that this process serves a pulled version, which other code installed whole.

        Args:
            version: The version, such as a :class:`~trinity_events.weights.PulledVersion`.
            verified_at: Unix time in seconds at which the last byte was verified.
            phases: Seconds of each phase.
            proof: Checks of what the process computes with, if it made any.
        """
        self._reader.applied(version, verified_at, phases, proof)

    def pausing(
        self, ready: StepReady, *, mode: PauseMode, in_flight: int = 0
    ) -> AbstractContextManager[Pause]:
        """Publish that this process's engine stands still for a version, for the block.

        The events have its lease, which is the synchronizer's deadline, and what the engine serves
        afterwards: the version, or else :attr:`Pause.serves`.

        Args:
            ready: The announcement.
            mode: Treatment of requests under way.
            in_flight: Requests that are under way.
        """
        version = StepRef(ready.epoch, ready.step)
        return publish_pause(self._session.events, version, mode, in_flight, self.settings.deadline)

    def report_refusal(self, ready: StepReady, error: CorruptVersion | ProofTooWeak) -> None:
        """Publish that this process does not serve a version, which other code was to install.

        Args:
            ready: The announcement.
            error: The reason, such as a :class:`~trinity_events.errors.NotAsPublished`.
        """
        self._reader.report_refusal(ready, error)

    def load(
        self,
        module: torch.nn.Module,
        ready: StepReady,
        selection: Selection | None = None,
        *,
        cast: bool = False,
        checks: InstallChecks = ALL_COMPARED,
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
        return self._reader.load(module, ready, selection, cast=cast, checks=checks)

    # --- collective groups -----------------------------------------------------------------

    def get_weight_sync_info(self) -> WeightSyncInfo | None:
        """Return the address at which the group is formed.

        The trainer's rank 0 listens there from the first call, and publishes it on the weights'
        server. An explorer returns None until it has joined and found the trainer.
        """
        groups = self._session.groups
        return groups.listen(self.epoch) if self.epoch else groups.sync_info()

    def setup_weight_sync_group(
        self, explorers: int = 1, timeout: float = 300.0
    ) -> tuple[str, ...]:
        """Wait on the trainer's rank 0 for this many explorers, and form the group with them.

        A later version goes to the explorers that are members when it is sent: the group is formed
        again if an explorer has left or joined.

        Returns:
            The explorers' names, in the order of their ranks, which begin at 1.

        Raises:
            DeadlineExceeded: when fewer were there within ``timeout`` seconds.
            GroupBroken: when the group could not be formed with these explorers.
        """
        return self._session.groups.set_up(self.epoch, explorers, timeout)

    def join_weight_sync_group(self) -> None:
        """Join the trainer's groups from now on, in the background of an explorer."""
        self._session.groups.join()

    def request_resend(self, ready: StepReady) -> bool:
        """On an explorer: ask the trainer for a version that was sent before we were there.

        It sends what it has then, as soon as it waits for explorers, and says so in the log.
        Returns False, and asks for nothing, of a version that is not sent, and when a newer one
        has come already or the trainer is not found.
        """
        return self._reader.request_resend(ready)

    def teardown_weight_sync_group(self) -> None:
        """End the group; it can be set up, or joined, again."""
        self._session.groups.tear_down()

    def model_update_group(
        self, global_step: int, probes: Probes | None = None
    ) -> ModelUpdateGroup:
        """On the trainer's rank 0: the group as the helpers take it, for this step's version."""
        return ModelUpdateGroup(self.publication(global_step, ranks=(0,), probes=probes))
