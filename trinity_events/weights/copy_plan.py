"""Plan of the copies from the parts of a version into the tensors of a model: which bytes go where.

Made from the manifests alone, before any byte is read. An installation and a load follow one plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from trinity_schemas import TensorEntry, WeightManifest

from ..errors import IncompatibleWeights
from .compatibility import brought_twice, check_covered, compatible_target
from .part_bytes import PartBytes
from .pulled_version import Piece, Selection, selected_slice, shares
from .slices import TensorSlice, contiguous_runs
from .tensors import DTYPES

_NOWHERE = PartBytes([])


class PlannedSlice(NamedTuple):
    """Slice that a part holds of a tensor, and that a tensor of the model needs."""

    entry: TensorEntry
    """Entry of the tensor, or shard, in the part's manifest."""
    target: torch.Tensor
    """Tensor of the model."""
    held: TensorSlice
    """Slice that the part holds."""
    box: TensorSlice
    """Slice that the model's tensor holds."""
    inner: TensorSlice
    """Slice that both have in common, which is copied."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the part's bytes."""
        return DTYPES[self.entry.dtype]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield the contiguous runs: offset in the part, offset in the tensor, and bytes."""
        offset = self.entry.offset
        for source, at, nbytes in contiguous_runs(
            self.held, self.box, self.inner, self.dtype.itemsize
        ):
            yield offset + source, at, nbytes

    def run(self) -> tuple[int, int, int] | None:
        """Return the only run, as of :meth:`runs`; None if there are several, or no bytes."""
        first = next(self.runs(), None)
        whole = self.dtype.itemsize * self.inner.volume
        return first if first is not None and first[2] == whole else None


class CopyPlan(NamedTuple):
    """Copies of all parts of a version into the tensors of a model."""

    parts: list[list[PlannedSlice]]
    """Slices that each part brings, in the order of the part's bytes."""
    twice: list[list[str]]
    """Groups of names that are one tensor in the model, and whose bytes must be equal."""


def plan_copies(
    targets: Mapping[str, torch.Tensor],
    manifests: Sequence[WeightManifest],
    wanted: Selection | None,
    *,
    cast: bool = False,
) -> CopyPlan:
    """Plan the copies from the parts of a version into these tensors.

    Args:
        targets: Tensors of the model by name.
        manifests: Manifests of the parts.
        wanted: Tensors to copy, and the slice of each that the model's tensor holds.
        cast: Allow another floating-point dtype in the model.

    Raises IncompatibleWeights when names, shapes or dtypes do not fit, and when shards overlap or
    leave a hole. It names the first.
    """
    pieces: dict[str, list[tuple[int, Piece]]] = {}
    for number, manifest in enumerate(manifests):
        for entry in manifest.tensors:
            pieces.setdefault(entry.name, []).append((number, Piece(entry, _NOWHERE)))
    for name in wanted or ():
        if name not in pieces:
            raise IncompatibleWeights(f"the version has no {name!r}, which is wanted")
    names: Collection[str] = pieces.keys() if wanted is None else wanted.keys()
    parts: list[list[PlannedSlice]] = [[] for _ in manifests]
    for name in names:
        box = None if wanted is None else wanted[name]
        for number, planned in _planned(targets, name, pieces[name], box, cast=cast):
            parts[number].append(planned)
    subset = any(manifest.subset for manifest in manifests)
    if wanted is None and not subset and len(names) < len(targets):
        check_covered(targets, names)
    in_order = [sorted(slices, key=lambda one: one.entry.offset) for slices in parts]
    return CopyPlan(in_order, brought_twice(targets, names))


def _planned(
    targets: Mapping[str, torch.Tensor],
    name: str,
    pieces: list[tuple[int, Piece]],
    wanted: TensorSlice | None,
    *,
    cast: bool,
) -> Iterator[tuple[int, PlannedSlice]]:
    """Yield the slices that fill one tensor of the model, each with the number of its part."""
    shards = [piece for _, piece in pieces]
    box = selected_slice(name, shards, wanted)
    target = compatible_target(targets, name, shards[0].entry.dtype, box.shape, cast=cast)
    if len(shards) == 1 and shards[0].entry.begins is None:  # one piece is the whole tensor
        [(number, piece)] = pieces
        yield number, PlannedSlice(piece.entry, target, piece.box, box, box)
        return
    numbers = {id(piece): number for number, piece in pieces}
    for inner, piece in shares(name, shards, box):
        yield numbers[id(piece)], PlannedSlice(piece.entry, target, piece.box, box, inner)
