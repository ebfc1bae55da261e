"""Common part of all engines' broadcasts: rank 0 sends to a group while all ranks gather."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from trinity_events.weights import ModelUpdateGroup

from ..engines.base import NamedTensors
from ..runtime.collective_errors import CollectiveBroken
from ..runtime.collectives import raise_together, rank_and_world
from .publishing import NamedTensorSink, drain

UpdateGroup: TypeAlias = ModelUpdateGroup | dist.ProcessGroup
"""Version in transit to explorers, or a plain group whose other ranks know the tensors."""


class _Sender(NamedTensorSink, Protocol):
    def seal(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...


def broadcast_stream(
    tensors: NamedTensors,
    model_update_group: UpdateGroup | None,
    *,
    buffers: frozenset[str] = frozenset(),
) -> None:
    """Send full tensors to the other ranks of a group, streamed from rank 0. Collective.

    If rank 0 fails, all ranks finish the gathers and then raise.

    Args:
        tensors: Full tensors, gathered on all ranks as the iterator advances.
        model_update_group: The group, on its rank 0, which is the trainer's rank 0; None on other
            ranks.
        buffers: Names of tensors that may have values that are not finite.

    Raises:
        PeerFailed: on the ranks that did not fail themselves.
        GroupBroken: on rank 0, if a member of the group died or was too slow.
        CollectiveBroken: if a rank of the trainer died or was too slow.
        NonFiniteWeights: on rank 0, if a parameter has values that are not finite.
    """
    sender = _sender(model_update_group)
    error: Exception | None = None
    if sender is None and rank_and_world()[0] == 0:
        error = ValueError("rank 0 broadcasts the weights: it needs the group that receives them")
    try:
        error = drain(tensors, sender, error, buffers=buffers)
    except Exception as caught:
        broken = CollectiveBroken("gather", str(caught))
        if sender is not None:
            sender.fail(broken)
        raise broken from caught
    try:
        if sender is not None and error is None:
            try:
                sender.seal()
            except Exception as caught:
                error = caught
        # Before the explorers are told, below: the other ranks hold up the training loop.
        raise_together(error)
    finally:
        if sender is not None and error is not None:
            sender.fail(error)


def _sender(group: UpdateGroup | None) -> _Sender | None:
    return group if group is None or isinstance(group, ModelUpdateGroup) else _Bare(group)


class _Bare:
    """Sender of unframed tensors, in order, to peers that know their shapes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def add(self, name: str, tensor: torch.Tensor) -> None:
        del name
        try:
            # Collectives take contiguous tensors, and a transposed view is none.
            self._group.broadcast(tensor.detach().contiguous(), 0).wait()
        except RuntimeError as caught:
            raise CollectiveBroken("broadcast", str(caught)) from caught

    def seal(self) -> None:
        """Do nothing, since a plain group has no manifest."""

    def fail(self, error: BaseException) -> None:
        """Do nothing: the peers fail by their own timeout."""
