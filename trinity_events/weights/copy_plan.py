"""Which bytes of a part belong where in a model, chunk by chunk."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from trinity_schemas import WeightManifest

from ..errors import IncompatibleWeights
from .compatibility import check_covered, compatible_target
from .part_bytes import PartBytes
from .pulled_version import Piece, Selection, selected_slice, shares
from .slices import TensorSlice, contiguous_runs
from .tensors import DTYPES, as_buffer, as_bytes, copy_bytes, flat_bytes, is_plain, is_row_major

_NOWHERE = PartBytes([])
_NOTHING = torch.empty(0, device="cpu")


class CopyTarget:
    """Where the bytes of one tensor of the model go: to itself, or to memory beside it.

    Such memory is there from the tensor's first byte to its last, for one that is on a GPU, or
    whose elements do not lie together, or that has another dtype than what comes. Several threads
    may bring some.

    Args:
        target: The tensor of the model.
        dtype: Of what comes; by default the tensor's.
    """

    def __init__(self, target: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self._target = target.detach()
        self._dtype = dtype or target.dtype
        self._alike = target.dtype == self._dtype
        self._plain = self._alike and is_plain(self._target)
        self._left = target.numel() * self._dtype.itemsize
        self._filled = self._target if self._plain else _NOTHING
        """What is filled first."""
        self._memory: memoryview | None = None
        self._stream = (
            torch.cuda.stream(torch.cuda.current_stream(target.device))
            if target.is_cuda
            else nullcontext()
        )
        """The caller's: what it told the GPU before comes before the copy."""
        self._lock = threading.Lock()

    def memory_at(self, at: int, nbytes: int) -> memoryview:
        """Where so many of its bytes go, row-major."""
        if self._memory is None:
            self._begin()
            self._memory = as_bytes(self._filled)
        return self._memory[at : at + nbytes]

    def bring(self, at: int, source: int, nbytes: int) -> None:
        """Copy so many of its bytes, which are verified, from an address."""
        if not self._plain:
            self._begin()
        copy_bytes(self._filled.data_ptr() + at, source, nbytes)
        self.note_copied(nbytes)

    @property
    def device(self) -> torch.device:
        """Where the tensor is."""
        return self._target.device

    def copy(self, at: int, data: torch.Tensor) -> None:
        """Copy bytes of a device, which are verified; to a target on a device they stay there.

        Args:
            at: Where they go.
            data: uint8 [bytes].
        """
        if self._alike and is_row_major(self._target):
            with torch.inference_mode(self._target.is_inference()):
                flat_bytes(self._target)[at : at + len(data)].copy_(data)
        else:
            as_buffer(self.memory_at(at, len(data))).copy_(data)
            self.note_copied(len(data))

    def note_copied(self, nbytes: int) -> None:
        """So many bytes more are in their rooms, and verified."""
        if self._plain:
            return
        with self._lock:
            self._left -= nbytes
            if not self._left:
                # A thread has a mode and a stream of its own.
                mode = torch.inference_mode(self._target.is_inference())
                with mode, torch.no_grad(), self._stream:
                    self._target.copy_(self._filled)
                self._filled, self._memory = _NOTHING, None

    def _begin(self) -> None:
        with self._lock:
            if self._filled is _NOTHING:
                shape = self._target.shape
                self._filled = torch.empty(shape, dtype=self._dtype, device="cpu")


class PlannedSlice(NamedTuple):
    """What of a part's tensor, or shard, belongs into the model's."""

    offset: int
    """Of the tensor in the part."""
    target: CopyTarget
    held: TensorSlice
    box: TensorSlice
    inner: TensorSlice
    itemsize: int


class ByteRange(NamedTuple):
    """Bytes that lie together in a part, and in a tensor of the model."""

    begin: int
    """In the part, or in a chunk of it."""
    nbytes: int
    target: CopyTarget
    at: int

    @property
    def memory(self) -> memoryview:
        """Where they go."""
        return self.target.memory_at(self.at, self.nbytes)


def plan_copies(
    targets: Mapping[str, torch.Tensor],
    manifests: Sequence[WeightManifest],
    wanted: Selection | None,
    *,
    cast: bool = False,
) -> list[list[PlannedSlice]]:
    """Return what of each part goes where in these tensors of a model, in the order of its bytes.

    With ``cast``, floating-point tensors may be of another dtype in the model.
    """
    pieces: dict[str, list[tuple[int, Piece]]] = {}
    for number, manifest in enumerate(manifests):
        for entry in manifest.tensors:
            pieces.setdefault(entry.name, []).append((number, Piece(entry, _NOWHERE)))
    for name in wanted or ():
        if name not in pieces:
            raise IncompatibleWeights(f"the version has no {name!r}, which is wanted")
    names = list(pieces if wanted is None else wanted)
    plan: list[list[PlannedSlice]] = [[] for _ in manifests]
    for name in names:
        box = None if wanted is None else wanted[name]
        _plan_tensor(plan, targets, name, pieces[name], box, cast=cast)
    subset = any(manifest.subset for manifest in manifests)
    if wanted is None and not subset and len(names) < len(targets):
        check_covered(targets, set(names))
    return [sorted(found, key=lambda some: some.offset) for found in plan]


def _plan_tensor(
    plan: list[list[PlannedSlice]],
    targets: Mapping[str, torch.Tensor],
    name: str,
    pieces: list[tuple[int, Piece]],
    wanted: TensorSlice | None,
    *,
    cast: bool,
) -> None:
    shards = [piece for _, piece in pieces]
    box, dtype = selected_slice(name, shards, wanted), shards[0].entry.dtype
    target = compatible_target(targets, name, dtype, box.shape, cast=cast)
    landing, itemsize = CopyTarget(target, DTYPES[dtype]), DTYPES[dtype].itemsize
    if len(shards) == 1 and shards[0].entry.begins is None:  # no shards: all of it is there
        number, piece = pieces[0]
        plan[number].append(
            PlannedSlice(piece.entry.offset, landing, piece.box, box, box, itemsize)
        )
        return
    numbers = {id(piece): number for number, piece in pieces}
    for inner, piece in shares(name, shards, box):
        some = PlannedSlice(piece.entry.offset, landing, piece.box, box, inner, itemsize)
        plan[numbers[id(piece)]].append(some)


def about_to_change(module: torch.nn.Module) -> None:
    """Let autograd know that the parameters change."""
    torch.autograd.graph.increment_version(
        [one for one in module.parameters() if not one.is_inference()]
    )


def by_chunk(
    sizes: Sequence[int], plan: list[PlannedSlice]
) -> Iterator[tuple[int, list[ByteRange]]]:
    """Chunks of which something is wanted, and what, by where it begins in them."""
    index, begin = -1, 0
    end = 0
    found: list[ByteRange] = []
    for offset, landing, held, box, inner, itemsize in plan:
        for source, target, nbytes in contiguous_runs(held, box, inner, itemsize):
            first, at, left = offset + source, target, nbytes
            while left:
                while first >= end:
                    if found:
                        yield index, found
                        found = []
                    index += 1
                    begin, end = end, end + sizes[index]
                here = min(left, end - first)
                found.append(ByteRange(first - begin, here, landing, at))
                first, at, left = first + here, at + here, left - here
    if found:
        yield index, found
