"""Kinds of values by the names of their classes, so that torch and veRL are imported where used.

The trainer's process calls its ranks without tensors, and runs without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor

    from ..algorithms.batch import Batch


def is_tensor(value: Any) -> TypeGuard[Tensor]:
    """Return True for a tensor of torch."""
    return _has_base(value, "torch", "Tensor")


def is_batch(value: Any) -> TypeGuard[Batch]:
    """Return True for a batch of the algorithms."""
    return _has_base(value, "trinity_workers.algorithms.batch", "Batch")


def is_data_proto(value: Any) -> bool:
    """Return True for a `DataProto` of veRL."""
    return _has_base(value, "verl.protocol", "DataProto")


def _has_base(value: Any, module: str, name: str) -> bool:
    return any((base.__module__, base.__name__) == (module, name) for base in type(value).__mro__)
