"""Version that goes through a collective group, as the engine helpers take it."""

from __future__ import annotations

import torch

from .publication import Publication
from .publish import PublishedPartReport


class ModelUpdateGroup:
    """Sends one version, tensor by tensor, and publishes its events.

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
