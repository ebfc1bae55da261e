"""Parts that the publish strategies and the broadcasts share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from msgspec import Struct

from ..engines.base import LocalShard, NamedTensors


class ModelWeights(Struct, frozen=True):
    """Weights of an engine's model, in the forms that the ranks can publish."""

    full: Callable[[], NamedTensors]
    """Returns full tensors; the iterator gathers each one on all ranks."""
    shards: Callable[[], Iterable[LocalShard]]
    """Returns this rank's shards; all ranks' shards are the whole model, once.

    The call is collective. The iteration is not, and raises ShardsRefused on its own.
    """


class TakesTensors(Protocol):
    """Sink that takes full tensors one by one."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor."""
        ...


def drain(
    tensors: NamedTensors, taker: TakesTensors | None, error: Exception | None
) -> Exception | None:
    """Take part in every gather, and write as long as nothing went wrong; returns what did."""
    for name, tensor in tensors:
        if taker is not None and error is None:
            try:
                taker.add(name, tensor)
            except Exception as caught:
                error = caught  # the others are inside the gathers: go on with them
    return error
