"""Pulled version: the pieces of each of its tensors, and the tensors assembled from them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch

from trinity_schemas import StepRef, TensorEntry, WeightManifest

from ...errors import IncompatibleWeights
from ..deltas.reconstruct import FullPart, reconstructed
from ..part_bytes import PartBytes
from ..slices import TensorSlice, contains, coverage_error, full_slice, intersection
from ..tensors import DTYPES

Selection: TypeAlias = Mapping[str, TensorSlice | None]
"""Selected tensors by name, each with the selected slice; None is the whole tensor."""


class PulledVersion(NamedTuple):
    """A whole, verified version. Valid as long as it is held."""

    ref: StepRef
    digest: str
    bytes: int
    """Size of the version, and of its base if that was pulled too."""
    parts: tuple[tuple[WeightManifest, PartBytes], ...]
    """Manifest and bytes of each part; bytes outside the selection are undefined."""
    bases: tuple[FullPart | None, ...]
    """Base of each part; None if the part is full or its base was not pulled."""
    selection: Selection | None = None
    """Selection that was pulled; None is everything."""

    @property
    def names(self) -> Collection[str]:
        """Names of all selected tensors."""
        if self.selection is not None:
            return self.selection.keys()
        return names_in(manifest for manifest, _ in self.parts)

    def by_name(self) -> dict[str, list[Piece]]:
        """Return the pieces of each selected tensor: a whole tensor, or the shards of ranks.

        Raises IncompatibleWeights when a selected tensor is not in the version.
        """
        pieces: dict[str, list[Piece]] = {}
        for (manifest, buffer), base in zip(self.parts, self.bases, strict=True):
            for entry in manifest.tensors:
                pieces.setdefault(entry.name, []).append(Piece(entry, buffer, base))
        if self.selection is None:
            return pieces
        for name in self.selection:
            if name not in pieces:
                raise IncompatibleWeights(f"the version has no {name!r}, which is wanted")
        return {name: pieces[name] for name in self.selection}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and read-only tensors, views of the pulled bytes if these are contiguous.

        Tensors assembled from shards or deltas are copies, made when the iterator reaches them.

        Raises IncompatibleWeights when shards overlap, leave a hole or disagree on a tensor, and
        for a selected slice outside the tensor. Raises CorruptVersion when a delta does not give
        the published tensor.
        """
        if self.selection is None and len(self.parts) == 1:
            [(manifest, buffer)], [base] = self.parts, self.bases
            if all(entry.begins is None for entry in manifest.tensors):  # no shards to assemble
                for entry in manifest.tensors:
                    yield entry.name, reconstructed(entry, buffer, base)
                return
        for name, pieces in self.by_name().items():
            box = None if self.selection is None else self.selection[name]
            if box is None and pieces[0].entry.begins is None and len(pieces) == 1:
                yield name, pieces[0].tensor()
            else:
                yield name, _assembled(name, pieces, box)


class Piece(NamedTuple):
    """One part's share of a tensor."""

    entry: TensorEntry
    buffer: PartBytes
    """Bytes of the part."""
    base: FullPart | None = None
    """Base of the part, if it was pulled."""

    @property
    def box(self) -> TensorSlice:
        """Slice of the tensor that the piece holds."""
        return slice_of(self.entry)

    def tensor(self) -> torch.Tensor:
        """Return the elements, a view if they are dense and aligned."""
        return reconstructed(self.entry, self.buffer, self.base)


def names_in(manifests: Iterable[WeightManifest]) -> Collection[str]:
    """Return the names of all tensors in the parts of a version."""
    return {entry.name for manifest in manifests for entry in manifest.tensors}


def slice_of(entry: TensorEntry) -> TensorSlice:
    """Return the slice of its tensor that an entry of a manifest holds."""
    return (
        full_slice(entry.shape) if entry.begins is None else TensorSlice(entry.begins, entry.shape)
    )


def shape_of(name: str, pieces: list[Piece]) -> tuple[int, ...]:
    """Return the whole tensor's shape. Raises IncompatibleWeights if the pieces disagree on it."""
    forms = {(piece.entry.dtype, piece.entry.global_shape or piece.entry.shape) for piece in pieces}
    if len(forms) > 1:
        raise IncompatibleWeights(f"{name!r} is several things in the version: {sorted(forms)}")
    return forms.pop()[1]


def selected_slice(name: str, pieces: list[Piece], box: TensorSlice | None) -> TensorSlice:
    """Return the selected slice of a tensor; ``box`` None selects the whole tensor.

    Raises IncompatibleWeights if the pieces disagree on the tensor, or the slice is outside it.
    """
    if len(pieces) > 1 and any(piece.entry.begins is None for piece in pieces):
        raise IncompatibleWeights(f"{name!r} comes twice in the version, whole once at least")
    all_of_it = full_slice(shape_of(name, pieces))
    if box is None:
        return all_of_it
    if not contains(all_of_it, box):
        raise IncompatibleWeights(
            f"of {name!r} {list(box.shape)} from {list(box.offsets)} is wanted, but it is "
            f"{list(all_of_it.shape)} in the version"
        )
    return box


def shares(name: str, pieces: list[Piece], box: TensorSlice) -> Iterator[tuple[TensorSlice, Piece]]:
    """Yield each piece that meets the selected slice, with the slice that they have in common.

    Raises IncompatibleWeights unless the pieces cover the selected slice exactly once.
    """
    fault = coverage_error(box, [piece.box for piece in pieces])
    if fault is not None:
        raise IncompatibleWeights(f"the shards of {name!r} do not make it up: {fault}")
    for piece in pieces:
        part = intersection(box, piece.box)
        if part is not None:
            yield part, piece


def _assembled(name: str, pieces: list[Piece], box: TensorSlice | None) -> torch.Tensor:
    target_box = selected_slice(name, pieces, box)
    parts = list(shares(name, pieces, target_box))  # checked before the memory is allocated
    made = torch.empty(target_box.shape, dtype=DTYPES[pieces[0].entry.dtype], device="cpu")
    for part, piece in parts:
        made[part.inside(target_box)] = piece.tensor()[part.inside(piece.box)]
    return made
