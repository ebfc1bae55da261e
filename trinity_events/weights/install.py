"""Install a pulled version in a model, in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch

from trinity_schemas import TensorEntry

from ..errors import IncompatibleWeights
from .compatibility import targets_of, tied
from .copy_plan import PlannedSlice, plan_copies
from .deltas.apply import ModelDiffers, checked, overlay
from .devices.host_to_device import copy_pairs
from .part_bytes import PartBytes
from .pulled_version import Piece, PulledVersion, selected_slice, shares
from .slices import Shape
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
    copies: list[tuple[int, int, int]]
    """Target address, source address and size in bytes of each plain copy."""
    changed: list[torch.Tensor]
    """Targets of plain copies, of which autograd is told."""
    held: list[torch.Tensor]
    """Sources of plain copies that are not the version's own memory, kept alive here."""
    deltas: list[tuple[torch.Tensor, memoryview]]
    """Target (or view) and delta, applied once everything is copied."""


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
    manifests = [manifest for manifest, _ in version.parts]
    plan = plan_copies(targets, manifests, version.wanted, cast=cast)
    fit = Fit([], [], [], [], [])
    for part, (_, buffer), base in zip(plan.parts, version.parts, version.bases, strict=True):
        copied = zip(part.entries, part.targets, strict=True)
        slices = [PlannedSlice(*one) for one in copied if not _fit_whole(fit, *one, buffer)]
        for planned in chain(slices, part.slices):
            if not _fit_run(fit, planned, buffer):
                _fit_view(fit, planned, Piece(planned.entry, buffer, base))
    for one, *others in plan.twice:
        content = _content(version, one)
        for other in others:
            if _content(version, other) != content:
                raise IncompatibleWeights(
                    f"{one!r} and {other!r} are one tensor in the model and differ in the version: "
                    "is the model tied, and the one that was trained is not?"
                )
    return fit


def _fit_whole(fit: Fit, entry: TensorEntry, target: torch.Tensor, buffer: PartBytes) -> bool:
    """Add a copy of a whole tensor by address; return False if it needs more."""
    if not _is_by_address(entry, target, buffer):
        return False
    nbytes = target.nbytes
    fit.copies.append((target.data_ptr(), buffer.address(entry.offset, nbytes), nbytes))
    fit.changed.append(target)
    return True


def _fit_run(fit: Fit, planned: PlannedSlice, buffer: PartBytes) -> bool:
    """Add a copy of a contiguous run by address; return False if the slice needs torch."""
    entry, target, _ = planned
    run = planned.run() if _is_by_address(entry, target, buffer) else None
    if run is None:
        return False
    source, at, nbytes = run
    fit.copies.append((target.data_ptr() + at, buffer.address(source, nbytes), nbytes))
    fit.changed.append(target)
    return True


def _is_by_address(entry: TensorEntry, target: torch.Tensor, buffer: PartBytes) -> bool:
    """Return True if the elements are copied as bytes, between addresses of the host."""
    return (
        entry.encoding == "dense"
        and buffer.on_host
        and target.dtype == DTYPES[entry.dtype]
        and is_plain(target)
        and not target.is_inference()
    )


def _fit_view(fit: Fit, planned: PlannedSlice, piece: Piece) -> None:
    """Add a copy between views, or the delta of a view."""
    target, shared = planned.target, planned.shared
    view = target.detach()
    if shared is not None:
        view = view[shared.inner.inside(shared.box)]
    alike, dense = target.dtype == planned.dtype, piece.entry.encoding == "dense"
    if not alike and not dense and piece.base is None:
        raise ModelDiffers(
            f"{piece.entry.name!r} is {target.dtype} in the model: no delta can be applied to it"
        )
    if shared is not None and shared.inner != shared.held:
        fit.pairs.append((view, piece.tensor()[shared.inner.inside(shared.held)]))
        return
    if dense or not alike:
        fit.pairs.append((view, piece.tensor()))
        return
    source, delta = checked(view, piece)
    if source is None:
        pass
    elif is_plain(view) and is_plain(source) and not view.is_inference():
        fit.copies.append((view.data_ptr(), source.data_ptr(), view.nbytes))
        fit.changed.append(view)
        fit.held.append(source)
    else:
        fit.pairs.append((view, source))
    if delta:
        fit.deltas.append((view, delta))


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
