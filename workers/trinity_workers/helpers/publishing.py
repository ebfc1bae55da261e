"""Parts that the publish strategies and the broadcasts share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import torch
from msgspec import Struct

from trinity_events.weights.compatibility import plain_name

from ..engines.base import LocalShard, NamedTensors
from ..engines.buffers import saved_buffers
from ..learning.finite import check_finite

PUBLISHED = "the weights to be published"
"""Name of a version's weights in errors; the event of the failure names the step."""


class ModelWeights(Struct, frozen=True):
    """Weights of an engine's model, in the forms that the ranks can publish."""

    full: Callable[[], NamedTensors]
    """Returns full tensors; the iterator gathers each one on all ranks."""
    shards: Callable[[], Iterable[LocalShard]]
    """Returns this rank's shards; all ranks' shards are the whole model, once.

    The call is collective. The iteration is not, and raises ShardsRefused on its own.
    """
    buffers: frozenset[str] = frozenset()
    """Names of tensors that may have values that are not finite, since they are no parameters."""


class TakesTensors(Protocol):
    """Sink that takes full tensors one by one."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor."""
        ...


def buffer_names(module: Any) -> frozenset[str]:
    """Return the published names of a model's buffers; none for a list of Megatron's chunks."""
    if not isinstance(module, torch.nn.Module):
        return frozenset()
    return frozenset(plain_name(name) for name, _ in saved_buffers(module))


def drain(
    tensors: NamedTensors,
    taker: TakesTensors | None,
    error: Exception | None,
    *,
    buffers: Collection[str] | None = frozenset(),
) -> Exception | None:
    """Take part in every gather, and write as long as nothing went wrong; return what did.

    Args:
        tensors: Full tensors, gathered as the iterator advances.
        taker: Sink of the tensors; None on ranks that only gather.
        error: Error because of which nothing is written.
        buffers: Names of tensors that need not be finite; None if the sink checks by itself.
    """
    for name, tensor in tensors:
        if taker is not None and error is None:
            try:
                if buffers is not None:
                    check_finite([(name, tensor)], PUBLISHED, exempt=buffers)
                taker.add(name, tensor)
            except Exception as caught:
                error = caught  # the others are inside the gathers: go on with them
    return error
