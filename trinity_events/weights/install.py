"""Install a pulled version in a model, in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from trinity_schemas import TensorEntry

from ..errors import IncompatibleWeights
from .compatibility import brought_twice, check_covered, compatible_target, targets_of, tied
from .deltas.apply import ModelDiffers, checked, overlay
from .devices.host_to_device import copy_pairs
from .part_bytes import PartBytes, as_tensor
from .pulled_version import Piece, PulledVersion, selected_slice, shares
from .slices import Shape, TensorSlice
from .tensors import DTYPES, as_bytes, copy_bytes, digest, is_plain
from .threads import in_threads

_LARGE = 64 << 10
"""Bytes from which a copy may run in another thread."""
_PIECE = 2 << 20
"""Bytes of one job of a thread; larger copies are split."""


class Fit(NamedTuple):
    """Copies that install a version. Valid as long as the version is held."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    """Target (or view of one) and source of each copy that needs torch."""
    plain: list[torch.Tensor]
    """Targets (or views) that are contiguous, as their sources are."""
    copies: list[tuple[int, int, int]]
    """Target address, source address and size in bytes of each plain copy."""
    held: list[torch.Tensor]
    """Sources of plain copies that are not the version's own memory, kept alive here."""
    deltas: list[tuple[torch.Tensor, memoryview]]
    """Target (or view) and delta, applied once everything is copied."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Add a copy into a target or a view of one."""
        together = is_plain(target) and is_plain(source) and not target.is_inference()
        if together and target.dtype == source.dtype:
            self.plain.append(target)
            self.copies.append((target.data_ptr(), source.data_ptr(), target.nbytes))
            self.held.append(source)
        else:
            self.pairs.append((target, source))


def check_fit(module: torch.nn.Module, version: PulledVersion, *, cast: bool = False) -> Fit:
    """Pair every parameter with its tensors of the version, before anything is changed.

    A parameter that shares memory with a published one (tied embeddings) needs no tensor of its
    own. For a version that was pulled in part, each parameter has the shape of the selected slice.
    A subset, such as an adapter, needs to cover only its own tensors.

    The digest of a delta is checked on its result: over the pulled base, or else over the model's
    tensor.

    With ``cast``, floating-point tensors may have another dtype in the model; the copy converts
    them.

    Raises:
        IncompatibleWeights: when names, shapes or dtypes do not fit, when shards overlap or leave
            a hole, or when one tensor of the model comes as two that differ. It names the first.
        ModelDiffers: when the model does not hold the base of the version.
        CorruptVersion: when the pulled base and the delta do not give the published tensor.
    """
    return _check_fit(targets_of(module), version, cast=cast)


def _check_fit(
    targets: dict[str, torch.Tensor], version: PulledVersion, *, cast: bool = False
) -> Fit:
    fit, names = Fit([], [], [], [], []), set[str]()
    pieces: dict[str, list[Piece]] = {}
    if version.wanted is None:
        for (manifest, buffer), base in zip(version.parts, version.bases, strict=True):
            for entry in manifest.tensors:
                if entry.begins is None and entry.encoding == "dense" and entry.name not in names:
                    names.add(entry.name)
                    _fit_whole(fit, targets, entry, buffer, cast=cast)
                else:
                    pieces.setdefault(entry.name, []).append(Piece(entry, buffer, base))
    else:
        pieces = version.by_name()
    for name in pieces:
        if name in names:
            raise IncompatibleWeights(f"{name!r} comes twice in the version, whole each time")
        box = None if version.wanted is None else version.wanted[name]
        _fit_pieces(fit, targets, name, pieces[name], box, cast=cast)
    names.update(pieces)
    subset = any(manifest.subset for manifest, _ in version.parts)
    if version.wanted is None and not subset and len(names) < len(targets):
        check_covered(targets, names)
    for one, *others in brought_twice(targets, names):
        content = _content(version, one)
        for other in others:
            if _content(version, other) != content:
                raise IncompatibleWeights(
                    f"{one!r} and {other!r} are one tensor in the model and differ in the version: "
                    "is the model tied, and the one that was trained is not?"
                )
    return fit


def install(fit: Fit) -> None:
    """Copy everything into the model, then apply the deltas.

    Plain copies go by address: torch's copy costs many times a small memmove, and is slower than
    the C library for large copies. The engine is paused meanwhile, so all cores may help.
    """
    large: list[tuple[int, int, int]] = []
    for to, source, nbytes in fit.copies:
        if nbytes < _LARGE:
            copy_bytes(to, source, nbytes)
        else:
            large += _pieces(to, source, nbytes)
    in_threads(_copy_some, large, sum(nbytes for _, _, nbytes in large))
    if fit.plain:  # so that autograd knows
        torch.autograd.graph.increment_version(fit.plain)
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
    _check_fit(targets, version)
    for entry in chain.from_iterable(manifest.tensors for manifest, _ in version.parts):
        asked = version.wanted is None or entry.name in version.wanted
        if asked and entry.begins is not None:
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


def _content(version: PulledVersion, name: str) -> dict[Shape, str]:
    """Return the digests of the slices that fill a tensor of the model, by their offsets."""
    pieces = version.by_name()[name]
    box = selected_slice(name, pieces, None if version.wanted is None else version.wanted[name])
    found: dict[Shape, str] = {}
    for part, piece in shares(name, pieces, box):
        at = tuple(mine - its for mine, its in zip(part.offsets, box.offsets, strict=True))
        if piece.entry.encoding == "dense" or part != piece.box:
            found[at] = digest(as_bytes(piece.tensor()[part.inside(piece.box)]))
        else:  # the entry has the digest of all its bytes
            assert piece.entry.digest is not None
            found[at] = piece.entry.digest
    return found


def _pieces(target: int, source: int, nbytes: int) -> list[tuple[int, int, int]]:
    return [
        (target + begin, source + begin, min(_PIECE, nbytes - begin))
        for begin in range(0, nbytes, _PIECE)
    ]


def _copy_some(pieces: Sequence[tuple[int, int, int]]) -> None:
    for piece in pieces:
        copy_bytes(*piece)


def _fit_whole(
    fit: Fit, targets: dict[str, torch.Tensor], entry: TensorEntry, buffer: PartBytes, *, cast: bool
) -> None:
    target = compatible_target(targets, entry.name, entry.dtype, entry.shape, cast=cast)
    alike = target.dtype == DTYPES[entry.dtype]
    if alike and buffer.on_host and is_plain(target) and not target.is_inference():
        nbytes = target.nbytes
        source = buffer.address(entry.offset, nbytes)
        fit.plain.append(target)
        fit.copies.append((target.data_ptr(), source, nbytes))
    else:
        fit.pairs.append((target, as_tensor(buffer, entry)))


def _fit_pieces(
    fit: Fit,
    targets: dict[str, torch.Tensor],
    name: str,
    pieces: list[Piece],
    wanted: TensorSlice | None,
    *,
    cast: bool,
) -> None:
    box = selected_slice(name, pieces, wanted)
    target = compatible_target(targets, name, pieces[0].entry.dtype, box.shape, cast=cast)
    alike = target.dtype == DTYPES[pieces[0].entry.dtype]
    for part, piece in shares(name, pieces, box):
        view = target.detach()[part.inside(box)]
        if not alike and piece.entry.encoding != "dense" and piece.base is None:
            raise ModelDiffers(
                f"{name!r} is {target.dtype} in the model: no delta can be applied to it"
            )
        if not alike or piece.entry.encoding == "dense" or part != piece.box:
            fit.copy(view, piece.tensor()[part.inside(piece.box)])
            continue
        source, delta = checked(view, piece)
        if source is not None:
            fit.copy(view, source)
        if delta:
            fit.deltas.append((view, delta))
