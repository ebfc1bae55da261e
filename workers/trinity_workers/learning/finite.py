"""Checks that numbers are finite: losses before a step, weights before they leave or enter a rank.

1. A loss that is not finite makes every gradient that it reaches NaN, so the global norm, which the
   engine reduces anyway, shows it to all ranks alike: no further collective decides about a step.
2. A step is taken only if that norm is finite. A skipped step changes no parameter, no optimizer
   state and no schedule.
3. Parameters are checked where their bytes are read anyway: as they are published, saved,
   exported and loaded. Buffers are exempt: a mask may hold minus infinity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from trinity_events.errors import TrinityError

_DIRECT = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Types that torch finds the extremes of without a copy; others are converted before."""

_CHECKED_AT_ONCE = 64
"""Tensors between two waits for a GPU: one wait for each tensor would cost more than the check."""


class NonFiniteWeights(TrinityError):
    """A tensor of a model's weights, or of its optimizer's state, has NaN or infinite values.

    Attributes:
        tensor: Name of the first such tensor.
        place: Source or destination of the weights, as the sentence names it.
        count: Number of its values that are not finite.
        size: Number of its values.
    """

    is_lasting = True

    tensor: str
    place: str
    count: int
    size: int
    text = (
        "{count} of {size} values of {tensor} in {place} are not finite (NaN or infinity): use "
        "weights, or a checkpoint, from before they became so"
    )


def backward_gradient(loss: Tensor) -> Tensor:
    """Return the gradient with which a loss starts its backward pass: 1, or NaN if not finite.

    A loss may be infinite while its gradients are finite, such as a sum that overflows.
    """
    return loss.detach() * 0 + 1


def with_backward_gradient(loss: Tensor) -> Tensor:
    """Return a loss of the same value whose gradients are NaN if it is not finite.

    For engines that start the backward pass themselves.
    """
    return loss * backward_gradient(loss)


def check_finite(
    tensors: Iterable[tuple[str, Tensor]], place: str, *, exempt: Collection[str] = ()
) -> None:
    """Check that tensors have no NaN and no infinity, but for those of exempt names.

    Sharded tensors are checked on this rank alone.

    Args:
        tensors: Tensors by name.
        place: Source or destination of the tensors, for the error.
        exempt: Names that are not checked, such as of buffers.

    Raises:
        NonFiniteWeights: naming the first tensor that has some.
    """
    pending: list[tuple[str, Tensor, Tensor]] = []
    for name, tensor in tensors:
        if name in exempt:
            continue
        for local in local_tensors(tensor):
            extremes = _extremes(local)
            if extremes is not None:
                pending.append((name, local, extremes))
        # The extremes stay on the GPU until here: reading them on the CPU waits for the GPU.
        if len(pending) >= _CHECKED_AT_ONCE:
            _raise_first(pending, place)
            pending.clear()
    _raise_first(pending, place)


def finite_tensors(
    tensors: Iterable[tuple[str, Tensor]], place: str, *, exempt: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, each checked as :func:`check_finite` does before it is yielded."""
    for name, tensor in tensors:
        check_finite([(name, tensor)], place, exempt=exempt)
        yield name, tensor
        # The consumer has let go of it: while the next one is made, this must not hold it.
        del tensor


def check_finite_model(model: Any, place: str) -> None:
    """Check the parameters of a model. Raises NonFiniteWeights."""
    with torch.no_grad():
        check_finite(model.named_parameters(), place)


def nested_tensors(value: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested mappings and sequences, by their path."""
    if isinstance(value, Tensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from nested_tensors(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from nested_tensors(item, f"{prefix}.{index}" if prefix else str(index))


def local_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors of which this rank holds a tensor."""
    if isinstance(tensor, DTensor):
        return [tensor.to_local().detach()]
    if isinstance(tensor, ShardedTensor):  # FSDP1 has them in sharded state dicts
        return [shard.tensor.detach() for shard in tensor.local_shards()]
    return [tensor.detach()]


def _extremes(tensor: Tensor) -> Tensor | None:
    """Return minimum and maximum [2] float64, NaN if a value is; None if there is none to check.

    This reads the tensor once. ``isfinite(tensor).all()`` makes several copies, and is 80 times
    slower on a CPU.
    """
    # aminmax() raises for a tensor without values.
    if not tensor.numel() or tensor.is_meta:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return None
    if tensor.dtype not in _DIRECT:
        if not str(tensor.dtype).startswith("torch.float8"):
            return None  # float4 has neither NaN nor infinity
        tensor = tensor.float()
    return torch.stack(torch.aminmax(tensor)).double()


def _raise_first(pending: list[tuple[str, Tensor, Tensor]], place: str) -> None:
    """Raise NonFiniteWeights for the first of some tensors whose extremes are not finite."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, _, extremes in pending:
        by_device.setdefault(extremes.device, []).append(extremes)
    if all(bool(torch.isfinite(torch.stack(each)).all()) for each in by_device.values()):
        return
    for name, tensor, extremes in pending:
        if not bool(torch.isfinite(extremes).all()):
            # isfinite() is not there for some formats of float8, and wrong for others.
            comparable = tensor if tensor.is_complex() else tensor.double()
            count = tensor.numel() - int(torch.isfinite(comparable).sum())
            raise NonFiniteWeights(name, place, count, tensor.numel())
