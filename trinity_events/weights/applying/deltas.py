"""Apply deltas to the tensors of a model that holds their base."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from trinity_schemas import StepReady

from ..deltas.encoding import decode_delta, overwrite, words
from ..deltas.reconstruct import get_base, get_delta, makes
from ..errors import CorruptTensor, ModelDiffers
from ..tensors import as_bytes

if TYPE_CHECKING:
    from ..reading.pull import Piece, PulledVersion

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtype by element size in bytes; torch has few operations on unsigned dtypes."""


class InstalledBases:
    """Full parts under the version that a model holds, so that deltas can be applied to it."""

    def __init__(self) -> None:
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._fulls: frozenset[str] = frozenset()

    def fulls(self, module: torch.nn.Module) -> Collection[str]:
        """Return their manifest digests; none for another model than the last."""
        is_same_module = self._module is not None and self._module() is module
        return self._fulls if is_same_module else ()

    def forget(self) -> None:
        """Forget the model: its content is not known any more."""
        self._module, self._fulls = None, frozenset()

    def record(self, module: torch.nn.Module, ready: StepReady, version: PulledVersion) -> None:
        """Record that the model holds the whole version."""
        # Weak: an explorer may replace its model, and must be able to free the old one.
        self._module = weakref.ref(module)
        self._fulls = frozenset(
            manifest.base.manifest_digest if manifest.base else announced.manifest_digest
            for announced, (manifest, _) in zip(ready.parts, version.parts, strict=True)
        )


def check_delta(target: torch.Tensor, piece: Piece) -> tuple[torch.Tensor | None, memoryview]:
    """Verify a delta of a tensor, or shard, before it is applied; no copy of the tensor is made.

    Args:
        target: The model's tensor, of the same shape.
        piece: The delta.

    Returns:
        The base to copy first, or None if the target holds it already; and the delta to apply.

    Raises:
        ModelDiffers: when the target and the delta do not give the published tensor.
        CorruptVersion: when the pulled base and the delta do not give it.
    """
    entry, buffer, base = piece
    source = None if base is None else get_base(entry, base)
    delta = get_delta(entry, buffer)
    # Verified without a write: a model that serves keeps its weights if the delta is wrong.
    if not makes(entry, target if source is None else source, delta):
        if source is None:
            raise ModelDiffers(tensor=entry.name, fault="delta")
        raise CorruptTensor(fault="delta", tensor=entry.name)
    return source, delta


def overlay(target: torch.Tensor, delta: memoryview) -> None:
    """Apply a delta to a tensor of any strides, on any device."""
    itemsize = target.element_size()
    # Positions count elements in row-major order.
    if not target.is_contiguous():
        copied = target.detach().cpu().contiguous()
        overwrite(words(as_bytes(copied), itemsize), delta)
        target.detach().copy_(copied)  # a tensor made in inference mode is written only so
        return
    flat = target.detach().reshape(-1).view(_SIGNED[itemsize])  # (elements,), bits and not numbers
    for start, positions, values in decode_delta(delta, flat.numel(), itemsize):
        where = torch.from_numpy(positions + start).to(flat.device)  # (changed,)
        # A copy, because torch warns about read-only memory.
        new = torch.frombuffer(bytearray(values), dtype=flat.dtype).to(flat.device)
        flat[where] = new
