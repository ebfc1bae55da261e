"""A version that was pulled: what there is of each of its tensors, in how many pieces."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch

from trinity_schemas import StepRef, TensorEntry, WeightManifest

from ..errors import IncompatibleWeights
from .deltas.reconstruct import FullPart, reconstructed
from .part_bytes import PartBytes
from .slices import TensorSlice, contains, coverage_error, full_slice, intersection
from .tensors import DTYPES

Selection: TypeAlias = Mapping[str, TensorSlice | None]
"""Tensors by name, and of each the part that is wanted; None is all of it."""


class PulledVersion(NamedTuple):
    """A version, whole and verified, for as long as it is held."""

    ref: StepRef
    digest: str
    bytes: int
    """Of the whole version, and of what it rests on where that was pulled too."""
    parts: tuple[tuple[WeightManifest, PartBytes], ...]
    """Each part's manifest and its bytes, undefined where nothing is wanted."""
    bases: tuple[FullPart | None, ...]
    """Of each part, the full one that it rests on; None when it is full, or was not pulled."""
    wanted: Selection | None = None
    """What was asked for; None is everything."""

    @property
    def names(self) -> Collection[str]:
        """Of all tensors that are wanted."""
        if self.wanted is not None:
            return self.wanted.keys()
        return names_in(manifest for manifest, _ in self.parts)

    def by_name(self) -> dict[str, list[Piece]]:
        """What there is of every tensor that is wanted: one piece, or the shards of several ranks.

        Raises IncompatibleWeights when something that is wanted is not in the version.
        """
        found: dict[str, list[Piece]] = {}
        for (manifest, buffer), base in zip(self.parts, self.bases, strict=True):
            for entry in manifest.tensors:
                found.setdefault(entry.name, []).append(Piece(entry, buffer, base))
        if self.wanted is None:
            return found
        for name in self.wanted:
            if name not in found:
                raise IncompatibleWeights(f"the version has no {name!r}, which is wanted")
        return {name: found[name] for name in self.wanted}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, views of the pulled bytes where they lie together: for reading alone.

        Of what is there as a delta they are copies, made as they are asked for.

        Raises IncompatibleWeights when shards leave a hole in a tensor, overlap, or do not agree on
        it, or it has not the box that is wanted, and CorruptVersion when what changed does not make
        what was published.
        """
        if self.wanted is None and len(self.parts) == 1:
            [(manifest, buffer)], [base] = self.parts, self.bases
            if all(entry.begins is None for entry in manifest.tensors):  # nothing to put together
                for entry in manifest.tensors:
                    yield entry.name, reconstructed(entry, buffer, base)
                return
        for name, pieces in self.by_name().items():
            box = None if self.wanted is None else self.wanted[name]
            if box is None and pieces[0].entry.begins is None and len(pieces) == 1:
                yield name, pieces[0].tensor()
            else:
                yield name, _assembled(name, pieces, box)


class Piece(NamedTuple):
    """What one part has of a tensor."""

    entry: TensorEntry
    buffer: PartBytes
    """The part's."""
    base: FullPart | None = None
    """What the part rests on, where it was pulled."""

    @property
    def box(self) -> TensorSlice:
        """Which part of the tensor it is."""
        return slice_of(self.entry)

    def tensor(self) -> torch.Tensor:
        """Its elements, a view where alignment allows and it is no delta."""
        return reconstructed(self.entry, self.buffer, self.base)


def names_in(manifests: Iterable[WeightManifest]) -> Collection[str]:
    """Of all tensors of a version's parts."""
    return {entry.name for manifest in manifests for entry in manifest.tensors}


def slice_of(entry: TensorEntry) -> TensorSlice:
    """Which part of a tensor an entry of a manifest is."""
    return (
        full_slice(entry.shape) if entry.begins is None else TensorSlice(entry.begins, entry.shape)
    )


def shape_of(name: str, pieces: list[Piece]) -> tuple[int, ...]:
    """The whole tensor's shape. Raises IncompatibleWeights when the pieces do not agree on it."""
    said = {(one.entry.dtype, one.entry.global_shape or one.entry.shape) for one in pieces}
    if len(said) > 1:
        raise IncompatibleWeights(f"{name!r} is several things in the version: {sorted(said)}")
    return said.pop()[1]


def selected_slice(name: str, pieces: list[Piece], wanted: TensorSlice | None) -> TensorSlice:
    """Which part of a tensor is wanted; None is all of it.

    Raises IncompatibleWeights when the pieces do not agree on what they are of, or that has no such
    part.
    """
    if len(pieces) > 1 and any(piece.entry.begins is None for piece in pieces):
        raise IncompatibleWeights(f"{name!r} comes twice in the version, whole once at least")
    all_of_it = full_slice(shape_of(name, pieces))
    if wanted is None:
        return all_of_it
    if not contains(all_of_it, wanted):
        raise IncompatibleWeights(
            f"of {name!r} {list(wanted.shape)} from {list(wanted.offsets)} is wanted, but it is "
            f"{list(all_of_it.shape)} in the version"
        )
    return wanted


def shares(
    name: str, pieces: list[Piece], wanted: TensorSlice
) -> Iterator[tuple[TensorSlice, Piece]]:
    """What each piece has of the wanted box.

    Raises IncompatibleWeights when together they do not have all of it, or some of it twice.
    """
    fault = coverage_error(wanted, [piece.box for piece in pieces])
    if fault is not None:
        raise IncompatibleWeights(f"the shards of {name!r} do not make it up: {fault}")
    for piece in pieces:
        part = intersection(wanted, piece.box)
        if part is not None:
            yield part, piece


def _assembled(name: str, pieces: list[Piece], wanted: TensorSlice | None) -> torch.Tensor:
    box = selected_slice(name, pieces, wanted)
    parts = list(shares(name, pieces, box))  # they have what the room is made for
    made = torch.empty(box.shape, dtype=DTYPES[pieces[0].entry.dtype], device="cpu")
    for part, piece in parts:
        made[part.inside(box)] = piece.tensor()[part.inside(piece.box)]
    return made
