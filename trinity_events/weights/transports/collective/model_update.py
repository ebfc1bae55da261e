"""Methods of the Synchronizer for a collective group, for trainer and explorer."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from trinity_schemas import StepReady, StepRef, SyncRequested

from .rendezvous import WeightSyncInfo
from .store import CollectiveStore

if TYPE_CHECKING:
    from ...publish import PublishedPartReport

logger = logging.getLogger(__name__)


class CollectiveGroups:
    """Mixin with the Synchronizer's methods for collective groups."""

    epoch: int

    if TYPE_CHECKING:

        def _store_of(self, transport: str) -> Any: ...

        @property
        def _publisher(self) -> Any: ...

    def get_weight_sync_info(self) -> WeightSyncInfo | None:
        """Return the address at which the group meets, or None if an explorer does not know it.

        The trainer's rank 0 listens from the first call on, and announces its address on the
        weights' server. An explorer knows the address once it has joined and found the trainer.
        """
        store = self._groups
        return store.listen(self.epoch) if self.epoch else store.found()

    def setup_weight_sync_group(
        self, explorers: int = 1, timeout: float = 300.0
    ) -> tuple[str, ...]:
        """Wait for ``explorers`` explorers and make the group with them; for the trainer's rank 0.

        A later version goes to the explorers that are connected when it is sent. If an explorer has
        left or joined, the group is made anew then.

        Returns:
            The explorers' names, in the order of their ranks, which begin at 1.

        Raises:
            DeadlineExceeded: if fewer explorers connected within ``timeout`` seconds.
            GroupBroken: if the group could not be made with them.
        """
        return self._groups.set_up(self.epoch, explorers, timeout)

    def join_weight_sync_group(self) -> None:
        """Join the trainer's groups from now on, in the background; for an explorer."""
        self._groups.join()

    def request_weights(self, ready: StepReady) -> bool:
        """Ask the trainer for a version that was sent before this explorer joined.

        The trainer sends its current version while it waits for explorers, and announces it in the
        log. Return False without a request if the version is not sent through a group, a newer one
        has come, or the trainer is not found.
        """
        if ready.transport != CollectiveStore.name:
            return False
        wanted = StepRef(ready.epoch, ready.step)
        if not self._groups.would_get(wanted):
            return False
        self._publisher.publish(SyncRequested(wanted=wanted))
        return True

    def teardown_weight_sync_group(self) -> None:
        """End the group; it can be set up or joined again."""
        self._groups.tear_down()

    def model_update_group(self, global_step: int) -> ModelUpdateGroup:
        """Return the group for the helpers, for this step's version; for the trainer's rank 0."""
        return ModelUpdateGroup(self, global_step)

    @property
    def _groups(self) -> CollectiveStore:
        store: CollectiveStore = self._store_of(CollectiveStore.name)
        return store


class ModelUpdateGroup:
    """Sender of one version, tensor by tensor, which also publishes its events to the log.

    ``fsdp_sync_weight_nccl`` and ``megatron_sync_weight_nccl`` take it on rank 0.
    """

    def __init__(self, synchronizer: Any, global_step: int) -> None:
        self._synchronizer = synchronizer
        self.global_step = global_step
        self._began = time.monotonic()
        self._writer: Any = None
        self.report: PublishedPartReport | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Send a tensor in buckets. Raises GroupBroken."""
        if self._writer is None:
            self._begin()
        self._writer.add(name, tensor)

    def seal(self) -> None:
        """Send the rest and the manifest; return once every explorer has the version."""
        if self._writer is None:
            self._begin()
        self.report = report = self._writer.seal()
        seconds = time.monotonic() - self._began
        self._synchronizer.part_published(self.global_step, 0, report, seconds)

    def fail(self, error: BaseException) -> None:
        """Tell the explorers and the log that the version will not come."""
        writer, self._writer = self._writer, None
        try:
            self._synchronizer.part_failed(self.global_step, 0, error)
        except Exception:
            logger.exception("step %d: the failure could not be published", self.global_step)
        if writer is not None:
            writer.discard()

    def _begin(self) -> None:
        self._synchronizer.open_version(self.global_step, ranks=(0,))
        self._writer = self._synchronizer.part_writer(self.global_step, 0)
