"""Installing a version that may rest on what the model has: only what changed is written."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch

from trinity_schemas import StepReady, TensorEntry

from ..errors import CorruptVersion
from .delta import decoded, overwrite, words
from .install import check_fit
from .pull import PulledVersion
from .rebuild import FullPart, based, delta_of, differs, makes
from .tensors import DTYPES, as_bytes, as_tensor

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Of as many bytes; torch has few operations on the unsigned ones."""


class ModelDiffers(CorruptVersion):
    """What changed does not make what was published: the model has not what was installed."""


class Patch(NamedTuple):
    """What is to be done to one tensor of a model."""

    target: torch.Tensor
    source: torch.Tensor | None
    """Copied first, where it is not what the target has already."""
    delta: memoryview
    """Laid over it then."""


class Installed:
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
        """The model has this version."""
        self._module = weakref.ref(module)
        self._fulls = frozenset(
            manifest.base.manifest_digest if manifest.base else announced.manifest_digest
            for announced, (manifest, _) in zip(ready.parts, version.parts, strict=True)
        )


def check_patches(module: torch.nn.Module, version: PulledVersion) -> list[Patch]:
    """What is to be done to a model, before anything is changed.

    Every tensor that is there as a delta is digested as it will be: over the full version where
    that was pulled, else over what the model has. Nothing of a tensor's size is kept for it.

    Raises:
        IncompatibleWeights: when names, shapes or dtypes do not fit, naming the first.
        ModelDiffers: when the model has not what the version rests on.
        CorruptVersion: when what the version rests on does not make it.
    """
    outline = _Outline(version)
    targets = [target for target, _ in check_fit(module, outline)]
    return [
        _checked(target, *what) for target, what in zip(targets, outline.entries(), strict=True)
    ]


def patch(patches: list[Patch]) -> None:
    """Do it."""
    with torch.no_grad():
        for target, source, delta in patches:
            if source is not None:
                target.copy_(source)
            if delta:
                _overwrite(target, delta)


class _Outline:
    """A version's tensors without what is in them."""

    def __init__(self, version: PulledVersion) -> None:
        self._version = version

    def entries(self) -> Iterator[tuple[TensorEntry, torch.Tensor, FullPart | None]]:
        """Each with the bytes of its part, and what the part rests on."""
        version = self._version
        for (manifest, buffer), base in zip(version.parts, version.bases, strict=True):
            for entry in manifest.tensors:
                yield entry, buffer, base

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of no memory."""
        for entry, _, _ in self.entries():
            yield entry.name, torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")


def _checked(
    target: torch.Tensor, entry: TensorEntry, buffer: torch.Tensor, base: FullPart | None
) -> Patch:
    if entry.encoding == "dense":
        return Patch(target, as_tensor(buffer, entry), memoryview(b""))
    source = None if base is None else based(entry, base)
    delta = delta_of(entry, buffer)
    if not makes(entry, target if source is None else source, delta):
        raise (ModelDiffers if source is None else CorruptVersion)(differs(entry))
    return Patch(target, source, delta)


def _overwrite(target: torch.Tensor, delta: memoryview) -> None:
    itemsize = target.element_size()
    if not target.is_contiguous():
        copied = target.detach().cpu().contiguous()
        overwrite(words(as_bytes(copied), itemsize), delta)
        target.copy_(copied)
        return
    flat = target.detach().reshape(-1).view(_SIGNED[itemsize])
    for start, positions, values in decoded(delta, flat.numel(), itemsize):
        where = torch.from_numpy(positions + start).to(flat.device)
        new = torch.frombuffer(bytearray(values), dtype=flat.dtype).to(flat.device)
        flat[where] = new
