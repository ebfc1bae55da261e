"""Install a pulled version in a model, in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress
from operator import not_

import torch

from ...errors import IncompatibleWeights
from ..compatibility import targets_of, tied
from ..devices.host_to_device import copy_pairs
from ..reading.pulled_version import PulledVersion
from ..tensors import copy_all, copy_bytes
from ..threads import in_threads
from .deltas import overlay
from .fit import Fit, fit_to

_LARGE = 64 << 10
"""Bytes from which a copy may run in another thread."""
_PIECE = 2 << 20
"""Bytes of one job of a thread; larger copies are split."""


def install(fit: Fit) -> None:
    """Copy everything into the model, then apply the deltas.

    Plain copies go by address: torch's copy costs many times a small memmove, and is slower than
    the C library for large copies. The engine is paused meanwhile, so all cores may help.
    """
    small = [nbytes < _LARGE for nbytes in fit.copies.sizes]
    copy_all(*(compress(column, small) for column in fit.copies))
    if not all(small):
        large = (compress(column, map(not_, small)) for column in fit.copies)
        pieces = [piece for copy in zip(*large, strict=True) for piece in _pieces(*copy)]
        in_threads(_copy_some, pieces, sum(nbytes for _, _, nbytes in pieces))
    if fit.changed:
        torch.autograd.graph.increment_version(fit.changed)
    with torch.no_grad():
        copy_pairs(fit.pairs)
        for target, delta in fit.deltas:
            overlay(target, delta)


def adopt(module: torch.nn.Module, version: PulledVersion) -> None:
    """Let the module serve from the version's own memory, without a copy.

    The module must only read: memory of a transport may not be written to. Its tensors are valid
    as long as the version is held, so hold it until the next one is adopted. An unpublished tensor
    that is tied to a published one gets the same memory.

    Raises as :func:`check_fit`. Raises IncompatibleWeights for shards, for an unpublished tensor
    that is tied to a published one with another layout, and for wrappers of tensors.
    """
    targets = targets_of(module)
    fit_to(targets, version)
    for entry in chain.from_iterable(manifest.tensors for manifest, _ in version.parts):
        is_selected = version.selection is None or entry.name in version.selection
        if is_selected and entry.begins is not None:
            raise IncompatibleWeights(
                f"{entry.name!r} comes in shards: they have to be copied together"
            )
    came = dict(version.tensors())  # all first: one of them may be corrupt
    others = tied(targets, came)
    for name, tensor in came.items():
        if tensor.numel() and not targets[name].data_ptr():  # a wrapper would keep its own memory
            raise IncompatibleWeights(
                f"{name!r} wraps another tensor in the model: it has to be copied"
            )
        if tensor.device != targets[name].device and tensor.numel():
            raise IncompatibleWeights(
                f"{name!r} is on {targets[name].device} in the model and on {tensor.device} in the "
                "version: it has to be copied"
            )
    for name, tensor in came.items():
        _rebind(targets[name], tensor)
    for name, other in others.items():
        _rebind(targets[name], came[other])


def _rebind(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Point a tensor of the model at the memory of another tensor."""
    made_for_inference = target.is_inference()
    if tensor.is_inference() != made_for_inference:  # else torch refuses to compute with the target
        with torch.inference_mode(made_for_inference):  # a view would inherit the mode of its base
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            storage, at = tensor.untyped_storage(), tensor.storage_offset()
            tensor = empty.set_(storage, at, tensor.shape, tensor.stride())
    target.data = tensor


def _pieces(target: int, source: int, nbytes: int) -> list[tuple[int, int, int]]:
    return [
        (target + begin, source + begin, min(_PIECE, nbytes - begin))
        for begin in range(0, nbytes, _PIECE)
    ]


def _copy_some(pieces: Sequence[tuple[int, int, int]]) -> None:
    for piece in pieces:
        copy_bytes(*piece)
