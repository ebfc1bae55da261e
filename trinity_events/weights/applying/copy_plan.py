"""Plan of the copies from the parts of a version into the tensors of a model: which bytes go where.

Made from the manifests alone, before any byte is read. An installation and a load follow one plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from trinity_schemas import TensorEntry, WeightManifest

from ..compatibility import check_covered, compatible_target, find_duplicates
from ..errors import AbsentTensor, UnassembledTensor
from ..part_bytes import PartBytes
from ..reading.pull import Piece, Selection, selected_slice, shares
from ..slices import TensorSlice, contiguous_runs
from ..tensors import DTYPES

# A plan needs the places of the pieces, not their bytes, which have not been read yet.
_NOWHERE = PartBytes([])


class SharedSlice(NamedTuple):
    """Slices of one tensor: those of the part and of the model, and what both have in common."""

    part_box: TensorSlice
    """Slice that the part holds."""
    box: TensorSlice
    """Slice that the model's tensor holds."""
    inner: TensorSlice
    """Slice that both have in common, which is copied."""


class PlannedSlice(NamedTuple):
    """Copy of a tensor, or of what a part holds of it, into a tensor of the model."""

    entry: TensorEntry
    """Entry of the tensor, or shard, in the part's manifest."""
    target: torch.Tensor
    """Tensor of the model."""
    shared: SharedSlice | None = None
    """Slices that are copied; None for a whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the part's bytes."""
        return DTYPES[self.entry.dtype]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield the contiguous runs: offset in the part, offset in the tensor, and bytes."""
        offset, itemsize = self.entry.offset, self.dtype.itemsize
        if self.shared is None:
            if self.target.numel():
                yield offset, 0, self.target.numel() * itemsize
            return
        for source, at, nbytes in contiguous_runs(*self.shared, itemsize):
            yield offset + source, at, nbytes

    def run(self) -> tuple[int, int, int] | None:
        """Return the only run, as of :meth:`runs`; None if there are several, or no bytes."""
        first = next(self.runs(), None)
        if first is None or self.shared is None:
            return first
        return first if first[2] == self.dtype.itemsize * self.shared.inner.volume else None


class PartPlan(NamedTuple):
    """Copies from one part. Whole tensors are in two lists: a part may have very many."""

    entries: list[TensorEntry]
    """Entries of the tensors that the part holds whole, and that are copied whole."""
    targets: list[torch.Tensor]
    """Tensor of the model for each of these entries."""
    slices: list[PlannedSlice]
    """Copies of slices, and of the shards of other ranks' tensors."""

    def in_order(self) -> list[PlannedSlice]:
        """Return all copies, in the order of the part's bytes."""
        whole = map(PlannedSlice, self.entries, self.targets)
        return sorted([*whole, *self.slices], key=lambda planned: planned.entry.offset)


class CopyPlan(NamedTuple):
    """Copies of all parts of a version into the tensors of a model."""

    parts: list[PartPlan]
    twice: list[list[str]]
    """Groups of names that are one tensor in the model, and whose bytes must be equal."""


def plan_copies(
    targets: Mapping[str, torch.Tensor],
    manifests: Sequence[WeightManifest],
    selection: Selection | None,
    *,
    cast: bool = False,
) -> CopyPlan:
    """Plan the copies from the parts of a version into these tensors.

    Args:
        targets: Tensors of the model by name.
        manifests: Manifests of the parts.
        selection: Tensors to copy, and the slice of each that the model's tensor holds.
        cast: Allow another floating-point dtype in the model.

    Raises IncompatibleWeights when names, shapes or dtypes do not fit, and when shards overlap or
    leave a hole. It names the first.
    """
    parts = [PartPlan([], [], []) for _ in manifests]
    whole: set[str] = set()
    pieces: dict[str, list[tuple[int, Piece]]] = {}
    for number, manifest in enumerate(manifests):
        entries, filled, _ = parts[number]
        for entry in manifest.tensors:
            name = entry.name
            # Whole tensors stay in plain lists: an object for each of many thousands costs more
            # than its copy.
            if selection is None and entry.begins is None and name not in whole:
                whole.add(name)
                entries.append(entry)
                filled.append(compatible_target(targets, name, entry.dtype, entry.shape, cast=cast))
            else:
                pieces.setdefault(name, []).append((number, Piece(entry, _NOWHERE)))
    # A name that came before, as a whole tensor or as shards of other ranks.
    for name in pieces.keys() & whole:
        raise UnassembledTensor(name, fault="twice")
    for name in selection or ():
        if name not in pieces:
            raise AbsentTensor(name, fault="selection")
    for name in pieces if selection is None else selection:
        box = None if selection is None else selection[name]
        for number, planned in _plan_slices(targets, name, pieces[name], box, cast=cast):
            parts[number].slices.append(planned)
    names: Collection[str] = whole | pieces.keys() if selection is None else selection.keys()
    subset = any(manifest.subset for manifest in manifests)
    if selection is None and not subset and len(names) < len(targets):
        # A version that leaves out a tensor would leave old bytes in the model.
        check_covered(targets, names)
    return CopyPlan(parts, find_duplicates(targets, names))


def _plan_slices(
    targets: Mapping[str, torch.Tensor],
    name: str,
    pieces: list[tuple[int, Piece]],
    box: TensorSlice | None,
    *,
    cast: bool,
) -> Iterator[tuple[int, PlannedSlice]]:
    """Yield the slices that fill one tensor of the model, each with the number of its part."""
    shards = [piece for _, piece in pieces]
    target_box = selected_slice(name, shards, box)
    target = compatible_target(targets, name, shards[0].entry.dtype, target_box.shape, cast=cast)
    # By identity: equal pieces may come from two parts.
    numbers = {id(piece): number for number, piece in pieces}
    for inner, piece in shares(name, shards, target_box):
        shared = SharedSlice(piece.box, target_box, inner)
        yield numbers[id(piece)], PlannedSlice(piece.entry, target, shared)
