"""Reader of versions: prefetches, pulls, applies and loads them, and reports what is served."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple, Protocol

import torch

from trinity_schemas import (
    AppliedPhases,
    PublicationStarted,
    ResendRequested,
    StepReady,
    StepRef,
    VersionOpened,
    VersionRefused,
    WeightsApplied,
    WeightsProof,
)

from ..core.limits import LONGEST_REASON
from ..errors import CorruptVersion, NotAsPublished, ProofTooWeak
from ..log.retry import retry_for
from ..system.error_text import format_message
from .applying.deltas import InstalledBases
from .applying.install import check_fit, install
from .applying.load import BaseRequired, load_version
from .applying.partial_loads import PartialLoads
from .applying.speculative_load import SpeculativeLoad
from .applying.verify_model import ALL_COMPARED, InstallChecks, check_installed
from .compatibility import find_targets, is_cast
from .errors import ModelDiffers
from .reading.model_folder import pull_folder
from .reading.pull import PulledVersion, Selection, pull_version
from .session import Session
from .transports.base import ChunkStore, Ended, PartRef, SupportsPrefetch
from .transports.collective import CollectiveStore
from .transports.redis.store import RedisChunkStore

logger = logging.getLogger(__name__)


class AnyVersion(Protocol):
    """Version that was pulled whole, by this process or by another one."""

    @property
    def ref(self) -> StepRef:
        """Its epoch and step."""
        ...

    @property
    def digest(self) -> str:
        """Digest that was announced, and that its bytes have."""
        ...

    @property
    def bytes(self) -> int:
        """Size of what was pulled."""
        ...


class LoadedVersion(NamedTuple):
    """Version that is in the model already, for the event."""

    ref: StepRef
    digest: str
    bytes: int


class VersionReader:
    """Reader of versions in a session. :class:`~trinity_events.Synchronizer` documents its methods.

    Args:
        session: Connections that it reads and reports through.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._run_id = session.settings.run_id
        self._installed = InstalledBases()
        self._speculative = SpeculativeLoad()
        self._partial = PartialLoads()

    def request_resend(self, ready: StepReady) -> bool:
        """Implement :meth:`Synchronizer.request_resend`."""
        if ready.transport != CollectiveStore.name:
            return False
        version = StepRef(ready.epoch, ready.step)
        if not self._session.groups.would_get(version):
            return False
        self._session.events.publish(ResendRequested(version=version))
        return True

    def prefetch(
        self,
        epoch: int,
        opened: VersionOpened | PublicationStarted,
        stop: threading.Event,
        deadline: float,
        into: torch.nn.Module | None = None,
    ) -> Ended | None:
        """Implement :meth:`Synchronizer.prefetch`."""
        store = self._session.stores.get(opened.transport)
        if not isinstance(store, SupportsPrefetch):
            return None
        parts = [PartRef(self._run_id, epoch, opened.step, rank) for rank in opened.ranks]
        self._speculative.abandon()
        on_part = None if into is None else self._speculative.begin(into)
        if on_part is not None:
            self._installed.forget()
        try:
            return store.prefetch(parts, stop, deadline, on_part)
        finally:
            if into is not None:
                # Also after an error: unverified bytes of a version may be in the module.
                self._partial.add(into, self._speculative.written_names)

    @contextmanager
    def pull(
        self, ready: StepReady, selection: Selection | None = None, have: Collection[str] = ()
    ) -> Iterator[PulledVersion]:
        """Implement :meth:`Synchronizer.pull`."""
        # The caller may change the module between, so that chunks written before count for nothing.
        self._speculative.abandon()
        with self._publishing_refusals(ready), ExitStack() as opened:
            with self._reporting_wait(ready):
                version = opened.enter_context(self._open_version(ready, selection, have))
            yield version

    def _open_version(
        self, ready: StepReady, selection: Selection | None, have: Collection[str]
    ) -> AbstractContextManager[PulledVersion]:
        if ready.kind != "state_dict":
            store = self._get_store(ready)
            return pull_version(store, self._run_id, ready, selection, have)
        folder = self._session.settings.checkpoint_folder
        if folder is None:
            raise ValueError("versions that are files need the Synchronizer's checkpoint_folder")
        return pull_folder(
            folder,
            self._run_id,
            ready,
            selection,
            redis_url=self._session.log_url,
            deadline=self._session.settings.deadline,
        )

    def _get_store(self, ready: StepReady) -> ChunkStore:
        """Return the store of a version; wait for a server that is away when it is opened."""
        get = partial(self._session.stores.get, ready.transport or RedisChunkStore.name)
        return retry_for(
            self._session.settings.deadline,
            get,
            on_first_error=partial(logger.warning, "waiting to read step %d: %s", ready.step),
        )

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
        """Implement :meth:`Synchronizer.apply`."""
        began = time.monotonic()

        def apply(have: Collection[str]) -> AppliedPhases:
            return self._apply(module, ready, selection, have, began, cast, install_context, checks)

        try:
            return apply(self._installed.fulls(module))
        except ModelDiffers as differs:
            logger.warning(
                "step %d: pulling the version again with its base: %s", ready.step, differs
            )
            # Without what the model was thought to hold: its weights were changed by other code.
            return apply(())

    def _reporting_wait(self, ready: StepReady) -> AbstractContextManager[object]:
        """Report the block as a wait for the version's bytes, if it lasts."""
        source = "files" if ready.kind == "state_dict" else ready.transport
        what = f"the bytes of the weights of step {ready.step}, from {source}"
        return self._session.events.waits.waiting(what)

    def _apply(
        self,
        module: torch.nn.Module,
        ready: StepReady,
        selection: Selection | None,
        have: Collection[str],
        began: float,
        cast: bool,
        install_context: Callable[[], AbstractContextManager[object]],
        checks: InstallChecks,
    ) -> AppliedPhases:
        with self.pull(ready, selection, have) as version:
            verified_at = time.time()
            manifests = [manifest for manifest, _ in version.parts]
            fit, names = check_fit(module, version, cast=cast), version.names
            fetched = time.monotonic()
            # From here on the model may hold bytes of two versions.
            self._installed.forget()
            # The engine stands still only for copies: all was fetched and checked before.
            with install_context(), self._partial.until_whole(module, names):
                held_at = time.monotonic()
                install(fit)
                proof = check_installed(module, manifests, selection, cast=cast, checks=checks)
                pause = time.monotonic() - held_at
            if cast and is_cast(find_targets(module), manifests):
                # Converted bytes are not those of a chunk, which cannot be written in place next
                # time.
                self._speculative.forget()
            elif selection is None and ready.kind == "weights":
                self._installed.record(module, ready, version)
                self._speculative.record(module, manifests)
        phases = AppliedPhases(fetch=fetched - began, pause=pause)
        self.applied(version, verified_at, phases, proof)
        return phases

    def applied(
        self,
        version: AnyVersion,
        verified_at: float,
        phases: AppliedPhases,
        proof: WeightsProof | None = None,
    ) -> None:
        """Implement :meth:`Synchronizer.applied`."""
        self._session.events.publish(
            WeightsApplied(
                version=version.ref,
                digest=version.digest,
                bytes=version.bytes,
                verified_at=verified_at,
                phases=phases,
                proof=proof,
            )
        )

    def load(
        self,
        module: torch.nn.Module,
        ready: StepReady,
        selection: Selection | None = None,
        *,
        cast: bool = False,
        checks: InstallChecks = ALL_COMPARED,
    ) -> AppliedPhases:
        """Implement :meth:`Synchronizer.load`."""
        if ready.kind == "state_dict":  # mapped files need no memory of their own
            return self.apply(module, ready, selection, cast=cast, checks=checks)
        began = time.monotonic()
        self._installed.forget()
        try:
            with self._publishing_refusals(ready), self._reporting_wait(ready):
                filled = load_version(
                    self._get_store(ready),
                    self._run_id,
                    ready,
                    module,
                    selection,
                    self._speculative,
                    self._partial,
                    cast=cast,
                    checks=checks,
                )
        except BaseRequired:
            return self.apply(module, ready, selection, cast=cast, checks=checks)
        finally:
            self._speculative.abandon()
        parts, proof = filled
        if cast and is_cast(find_targets(module), parts):
            self._speculative.forget()
        elif selection is None:
            self._speculative.record(module, parts)
        assert ready.version_digest is not None
        phases = AppliedPhases(fetch=0.0, pause=time.monotonic() - began)
        version = LoadedVersion(
            StepRef(ready.epoch, ready.step),
            ready.version_digest,
            sum(manifest.nbytes for manifest in parts),
        )
        self.applied(version, time.time(), phases, proof)
        return phases

    @contextmanager
    def _publishing_refusals(self, ready: StepReady) -> Iterator[None]:
        """Publish a refusal if the block finds the version corrupt."""
        try:
            yield
        except ModelDiffers:  # the fault is in the model, not in the version
            raise
        except (CorruptVersion, ProofTooWeak) as error:
            self.report_refusal(ready, error)
            raise

    def report_refusal(self, ready: StepReady, error: CorruptVersion | ProofTooWeak) -> None:
        """Implement :meth:`Synchronizer.report_refusal`."""
        event = VersionRefused(
            version=StepRef(ready.epoch, ready.step),
            rank=error.rank if isinstance(error, CorruptVersion) else None,
            chunk=error.chunk if isinstance(error, CorruptVersion) else None,
            check=error.check if isinstance(error, NotAsPublished | ProofTooWeak) else None,
            reason=format_message(error)[:LONGEST_REASON],
        )
        try:
            self._session.events.publish(event)
        # The refusal itself is what the caller must see.
        except Exception:
            logger.exception("step %d: the refusal could not be published", ready.step)
