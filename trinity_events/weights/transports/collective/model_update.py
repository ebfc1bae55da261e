"""Methods of the Synchronizer for collective groups, for the sender and for receivers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trinity_schemas import StepReady, StepRef, SyncRequested

from .rendezvous import WeightSyncInfo
from .store import CollectiveStore

if TYPE_CHECKING:
    from ...publication import Publication
    from ...publish import PublishedPartReport


class CollectiveGroups:
    """The Synchronizer's methods for groups; it brings the rest."""

    epoch: int

    if TYPE_CHECKING:

        def _store_of(self, transport: str) -> Any: ...

        @property
        def _publisher(self) -> Any: ...

    def get_weight_sync_info(self) -> WeightSyncInfo | None:
        """Return the address at which the group is formed.

        The trainer's rank 0 listens there from the first call, and publishes it on the weights'
        server. An explorer returns None until it has joined and found the trainer.
        """
        store = self._groups
        return store.listen(self.epoch) if self.epoch else store.found()

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
        return self._groups.set_up(self.epoch, explorers, timeout)

    def join_weight_sync_group(self) -> None:
        """Join the trainer's groups from now on, in the background of an explorer."""
        self._groups.join()

    def request_weights(self, ready: StepReady) -> bool:
        """On an explorer: ask the trainer for a version that was sent before we were there.

        It sends what it has then, as soon as it waits for explorers, and says so in the log.
        Returns False, and asks for nothing, of a version that is not sent, and when a newer one
        has come already or the trainer is not found.
        """
        if ready.transport != CollectiveStore.name:
            return False
        wanted = StepRef(ready.epoch, ready.step)
        if not self._groups.would_get(wanted):
            return False
        self._publisher.publish(SyncRequested(wanted=wanted))
        return True

    def teardown_weight_sync_group(self) -> None:
        """End the group; it can be set up, or joined, again."""
        self._groups.tear_down()

    def model_update_group(self, global_step: int) -> ModelUpdateGroup:
        """On the trainer's rank 0: the group as the helpers take it, for this step's version."""
        return ModelUpdateGroup(self, global_step)

    @property
    def _groups(self) -> CollectiveStore:
        store: CollectiveStore = self._store_of(CollectiveStore.name)
        return store


class ModelUpdateGroup:
    """Sends one version, tensor by tensor, and publishes its events.

    ``fsdp_sync_weight_nccl`` and ``megatron_sync_weight_nccl`` take it on rank 0.
    """

    def __init__(self, synchronizer: Any, global_step: int) -> None:
        self.global_step = global_step
        self._part: Publication = synchronizer.publication(global_step, 0, ranks=(0,))

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
