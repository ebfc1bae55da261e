"""Installing a version that may rest on what the model has: only what changed is written."""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch

from trinity_schemas import StepReady

from ...errors import CorruptVersion
from ..pulled_version import Piece, PulledVersion
from ..tensors import as_bytes
from .encoding import decoded, overwrite, words
from .reconstruct import based, delta_of, differs, makes

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Of as many bytes; torch has few operations on the unsigned ones."""


class ModelDiffers(CorruptVersion):
    """What changed does not make what was published: the model has not what was installed."""


class InstalledBases:
    """Which full parts lie under what a model has, so that deltas on them may be laid over it."""

    def __init__(self) -> None:
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._fulls: frozenset[str] = frozenset()

    def fulls(self, module: torch.nn.Module) -> Collection[str]:
        """Their manifest digests; none for another model than the last."""
        known = self._module is not None and self._module() is module
        return self._fulls if known else ()

    def forget(self) -> None:
        """Nothing is sure of the model any more."""
        self._module, self._fulls = None, frozenset()

    def note(self, module: torch.nn.Module, ready: StepReady, version: PulledVersion) -> None:
        """The model has this version, all of it."""
        self._module = weakref.ref(module)
        self._fulls = frozenset(
            manifest.base.manifest_digest if manifest.base else announced.manifest_digest
            for announced, (manifest, _) in zip(ready.parts, version.parts, strict=True)
        )


def checked(target: torch.Tensor, piece: Piece) -> tuple[torch.Tensor | None, memoryview]:
    """What makes a delta's tensor, or shard, in a model; nothing of its size is kept for it.

    Args:
        target: Where it goes, of the same shape.
        piece: What there is of it, as a delta.

    Returns:
        What is copied first, None where that is what the target has already; and what is laid over
        it then.

    Raises:
        ModelDiffers: when what the target has does not make it.
        CorruptVersion: when what it rests on does not make it.
    """
    entry, buffer, base = piece
    source = None if base is None else based(entry, base)
    delta = delta_of(entry, buffer)
    if not makes(entry, target if source is None else source, delta):
        raise (ModelDiffers if source is None else CorruptVersion)(differs(entry))
    return source, delta


def overlay(target: torch.Tensor, delta: memoryview) -> None:
    """Write what changed into a tensor of any strides, on any device."""
    itemsize = target.element_size()
    if not target.is_contiguous():
        copied = target.detach().cpu().contiguous()
        overwrite(words(as_bytes(copied), itemsize), delta)
        target.detach().copy_(copied)  # of one made in inference mode that alone may be written
        return
    flat = target.detach().reshape(-1).view(_SIGNED[itemsize])
    for start, positions, values in decoded(delta, flat.numel(), itemsize):
        where = torch.from_numpy(positions + start).to(flat.device)
        new = torch.frombuffer(bytearray(values), dtype=flat.dtype).to(flat.device)
        flat[where] = new
