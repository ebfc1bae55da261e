"""Install a pulled version in a model, in place: every copy is checked before any is made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, compress
from operator import not_
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from trinity_schemas import TensorEntry

from ..compatibility import ModuleFingerprint, distinct, find_targets, find_ties
from ..devices.host_to_device import DeviceCopies, copy_pairs
from ..errors import ModelDiffers, UnassembledTensor, UnfillableTensor, UnfitTensor
from ..part_bytes import PartBytes
from ..reading.pull import Piece, PulledVersion, Selection, selected_slice, shares
from ..slices import Shape
from ..tensors import DTYPES, as_bytes, copy_all, copy_bytes, digest, is_plain, is_row_major
from ..threads import in_threads
from .copy_plan import PlannedSlice, plan_copies
from .deltas import check_delta, overlay

_LARGE = 64 << 10
"""Bytes from which a copy may run in another thread."""
_PIECE = 2 << 20
"""Bytes of one job of a thread; larger copies are split."""


class ByteCopies(NamedTuple):
    """Copies of bytes to host addresses, in plain lists: a version may have very many."""

    targets: list[int]
    sources: list[int]
    """Addresses, or offsets in a part."""
    sizes: list[int]

    def add(self, target: int, source: int, nbytes: int) -> None:
        """Append a copy."""
        self.targets.append(target)
        self.sources.append(source)
        self.sizes.append(nbytes)


class Fit(NamedTuple):
    """Copies that install a version. Valid as long as the version is held."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    """Target (or view of one) and source of each copy that needs torch."""
    copies: ByteCopies
    """Plain copies between host addresses."""
    changed: list[torch.Tensor]
    """Targets of plain copies, of which autograd is told."""
    temporaries: list[torch.Tensor]
    """Sources of plain copies that are not the version's own memory, kept alive here."""
    deltas: list[tuple[torch.Tensor, memoryview]]
    """Target (or view) and delta, applied once everything is copied."""
    on_devices: list[tuple[DeviceCopies, list[torch.Tensor], list[int]]]
    """Plain copies into tensors of GPUs: their plan, targets, and addresses of the sources."""


class DeviceTargets(NamedTuple):
    """Copies of bytes of a part into whole tensors of GPUs."""

    targets: list[torch.Tensor]
    offsets: list[int]
    """Offset of each in the part."""
    sizes: list[int]


class _KnownDeviceTargets(NamedTuple):
    """Copies into tensors of GPUs, for later versions with their layout."""

    plan: DeviceCopies
    targets: list[int]
    """Numbers of the targets in the module's memory."""
    offsets: list[int]
    sizes: list[int]


class _FitPlan(NamedTuple):
    """Copies that depend on a version's layout alone, and those that depend on its bytes."""

    copies: list[ByteCopies]
    """Plain copies from each part, by their offsets in it."""
    changed: list[torch.Tensor]
    """Targets of plain copies."""
    on_devices: list[DeviceTargets]
    """Plain copies from each part into whole tensors of GPUs."""
    others: list[list[PlannedSlice]]
    """Copies from each part that need torch, and deltas."""
    twice: list[list[str]]

    @property
    def is_plain(self) -> bool:
        """True if no other copies, and no comparisons, are needed."""
        return not any(self.others) and not self.twice


class _KnownFit(NamedTuple):
    """Plain copies that installed a version in a module, for later versions with its layout."""

    entries: list[tuple[TensorEntry, ...]]
    """Entries of each part."""
    subset: bool
    selection: Selection | None
    copies: list[ByteCopies]
    memory: ModuleFingerprint
    changed: list[int]
    """Targets of the copies, by their numbers in the memory."""
    on_devices: list[_KnownDeviceTargets]
    """Plain copies from each part into tensors of GPUs."""

    def fit(self, module: torch.nn.Module, version: PulledVersion) -> Fit | None:
        """Return the copies of another version; None if its layout, or the module, differs."""
        same_layout = (
            len(version.parts) == len(self.entries)
            and all(
                # Identity suffices: manifests with the same entries share them as one object
                # (decode_manifest).
                manifest.tensors is entries and buffer.on_host
                for (manifest, buffer), entries in zip(version.parts, self.entries, strict=True)
            )
            # A subset need not cover the model, which a full version has to.
            and _is_subset(version) == self.subset
            and version.selection == self.selection
        )
        tensors = self.memory.find_unchanged(module) if same_layout else None
        if tensors is None:
            return None
        changed = list(map(tensors.__getitem__, self.changed))
        on_devices = [
            (
                part.plan,
                list(map(tensors.__getitem__, part.targets)),
                buffer.addresses(part.offsets, part.sizes),
            )
            for part, (_, buffer) in zip(self.on_devices, version.parts, strict=True)
        ]
        return Fit([], _locate(self.copies, version), changed, [], [], on_devices)


_last_fits: WeakKeyDictionary[torch.nn.Module, _KnownFit] = WeakKeyDictionary()
"""Last fit of each module, if it was plain copies alone."""


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
    last_fit = _last_fits.get(module)
    fit = None if last_fit is None else last_fit.fit(module, version)
    if fit is None:
        targets = find_targets(module)
        plan = _plan_fit(targets, version, cast=cast)
        fit = _fit(plan, version)
        _save_plan(module, targets, version, plan, fit)
    return fit


def _save_plan(
    module: torch.nn.Module,
    targets: dict[str, torch.Tensor],
    version: PulledVersion,
    plan: _FitPlan,
    fit: Fit,
) -> None:
    """Remember the plan of a module, or forget the last one if this one cannot be used again."""
    _last_fits.pop(module, None)
    tensors = distinct(targets.values())
    # Deltas are checked against the model's bytes each time, so their fit cannot be used again.
    full = all(manifest.base is None for manifest, _ in version.parts)
    if full and plan.is_plain and all(map(is_row_major, tensors)):
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        _last_fits[module] = _KnownFit(
            entries=[manifest.tensors for manifest, _ in version.parts],
            subset=_is_subset(version),
            selection=None if version.selection is None else dict(version.selection),
            copies=plan.copies,
            memory=ModuleFingerprint(module, tensors),
            changed=[numbers[id(tensor)] for tensor in plan.changed],
            on_devices=[
                _KnownDeviceTargets(
                    copies,
                    [numbers[id(tensor)] for tensor in part.targets],
                    part.offsets,
                    part.sizes,
                )
                for part, (copies, _, _) in zip(plan.on_devices, fit.on_devices, strict=True)
            ],
        )


def _is_subset(version: PulledVersion) -> bool:
    return any(manifest.subset for manifest, _ in version.parts)


def _plan_fit(targets: dict[str, torch.Tensor], version: PulledVersion, *, cast: bool) -> _FitPlan:
    manifests = [manifest for manifest, _ in version.parts]
    plan = plan_copies(targets, manifests, version.selection, cast=cast)
    made = _FitPlan([], [], [], [], plan.twice)
    for part, (_, buffer) in zip(plan.parts, version.parts, strict=True):
        copies, others = ByteCopies([], [], []), list[PlannedSlice]()
        on_devices = DeviceTargets([], [], [])
        for entry, target in zip(part.entries, part.targets, strict=True):
            if not _is_bytes(entry, target, buffer):
                others.append(PlannedSlice(entry, target))
            elif target.is_cpu:
                copies.add(target.data_ptr(), entry.offset, target.nbytes)
                made.changed.append(target)
            elif target.nbytes:
                on_devices.targets.append(target)
                on_devices.offsets.append(entry.offset)
                on_devices.sizes.append(target.nbytes)
        for planned in part.slices:
            by_address = planned.target.is_cpu and _is_bytes(planned.entry, planned.target, buffer)
            run = planned.run() if by_address else None
            if run is None:
                others.append(planned)
            else:
                source, at, nbytes = run
                copies.add(planned.target.data_ptr() + at, source, nbytes)
                made.changed.append(planned.target)
        made.copies.append(copies)
        made.on_devices.append(on_devices)
        made.others.append(others)
    return made


def _fit(plan: _FitPlan, version: PulledVersion) -> Fit:
    on_devices = [
        (DeviceCopies(part.targets), part.targets, buffer.addresses(part.offsets, part.sizes))
        for part, (_, buffer) in zip(plan.on_devices, version.parts, strict=True)
    ]
    fit = Fit([], _locate(plan.copies, version), plan.changed, [], [], on_devices)
    for others, (_, buffer), base in zip(plan.others, version.parts, version.bases, strict=True):
        for planned in others:
            _fit_view(fit, planned, Piece(planned.entry, buffer, base))
    for first, *rest in plan.twice:
        content = _content(version, first)
        for other in rest:
            # One memory cannot hold two tensors: the second copy would silently win.
            if _content(version, other) != content:
                raise UnfillableTensor(first, fault="tied", other=other)
    return fit


def _locate(parts: list[ByteCopies], version: PulledVersion) -> ByteCopies:
    """Return the copies from the addresses at which the version's parts lie."""
    all_copies = ByteCopies([], [], [])
    for copies, (_, buffer) in zip(parts, version.parts, strict=True):
        all_copies.targets.extend(copies.targets)
        all_copies.sources.extend(buffer.addresses(copies.sources, copies.sizes))
        all_copies.sizes.extend(copies.sizes)
    return all_copies


def _is_bytes(entry: TensorEntry, target: torch.Tensor, buffer: PartBytes) -> bool:
    """Return True if the elements are copied as bytes, from an address of the host."""
    return (
        entry.encoding == "dense"
        and buffer.on_host
        and target.dtype == DTYPES[entry.dtype]
        and (target.is_cpu or target.is_cuda)
        and is_row_major(target)
        # A tensor of inference mode has no version counter to increment.
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
        raise ModelDiffers(tensor=piece.entry.name, fault="dtype", dtype=str(target.dtype))
    # A slice of a delta is no delta: the piece is assembled whole, and cut then.
    if shared is not None and shared.inner != shared.part_box:
        fit.pairs.append((view, piece.tensor()[shared.inner.inside(shared.part_box)]))
        return
    if dense or not alike:
        fit.pairs.append((view, piece.tensor()))
        return
    source, delta = check_delta(view, piece)
    if source is None:
        pass
    elif is_plain(view) and is_plain(source) and not view.is_inference():
        fit.copies.add(view.data_ptr(), source.data_ptr(), view.nbytes)
        fit.changed.append(view)
        fit.temporaries.append(source)
    else:
        fit.pairs.append((view, source))
    if delta:
        fit.deltas.append((view, delta))


def _content(version: PulledVersion, name: str) -> dict[Shape, str]:
    """Return the digests of the slices that fill a tensor of the model, by their offsets."""
    pieces = version.by_name()[name]
    box = selected_slice(
        name, pieces, None if version.selection is None else version.selection[name]
    )
    digests: dict[Shape, str] = {}
    for part, piece in shares(name, pieces, box):
        at = tuple(mine - its for mine, its in zip(part.offsets, box.offsets, strict=True))
        if piece.entry.encoding == "dense" or part != piece.box:
            digests[at] = digest(as_bytes(piece.tensor()[part.inside(piece.box)]))
        else:  # the entry has the digest of all its bytes
            assert piece.entry.digest is not None
            digests[at] = piece.entry.digest
    return digests


def install(fit: Fit) -> None:
    """Copy everything into the model, then apply the deltas.

    Plain copies go by address: torch's copy costs many times a small memmove, and is slower than
    the C library for large copies. The engine is paused meanwhile, so all cores may help.
    """
    # Small copies go in one call without a step of Python for each; threads would cost more.
    small = list(map(_LARGE.__gt__, fit.copies.sizes))
    if all(small):
        copy_all(*fit.copies)
    else:
        copy_all(*(list(compress(column, small)) for column in fit.copies))
        large = (compress(column, map(not_, small)) for column in fit.copies)
        pieces = [piece for copy in zip(*large, strict=True) for piece in _pieces(*copy)]
        in_threads(_copy_some, pieces, sum(nbytes for _, _, nbytes in pieces))
    if fit.changed:
        # Copies by address do not pass autograd, which must see that the weights changed.
        torch.autograd.graph.increment_version(fit.changed)
    with torch.no_grad():
        for copies, targets, sources in fit.on_devices:
            copies.run(targets, sources)
        copy_pairs(fit.pairs)
        # Last: a delta overwrites elements of the base that was just copied.
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
    targets = find_targets(module)
    _fit(_plan_fit(targets, version, cast=False), version)  # raises if it does not fit
    for entry in chain.from_iterable(manifest.tensors for manifest, _ in version.parts):
        is_selected = version.selection is None or entry.name in version.selection
        if is_selected and entry.begins is not None:
            raise UnassembledTensor(entry.name, fault="shards")
    came = dict(version.tensors())  # all first: one of them may be corrupt
    others = find_ties(targets, came)
    for name, tensor in came.items():
        if tensor.numel() and not targets[name].data_ptr():  # a wrapper would keep its own memory
            raise UnfillableTensor(name, fault="wrapper")
        if tensor.device != targets[name].device and tensor.numel():
            raise UnfitTensor(
                name,
                fault="device",
                in_model=str(targets[name].device),
                in_version=str(tensor.device),
            )
    # Only now, after all checks: a model that is half rebound would serve two versions.
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
