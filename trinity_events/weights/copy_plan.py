"""Plan of copies from the bytes of a part, chunk by chunk, into the tensors of a model."""

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
    """Destination of the bytes of one tensor: the model's tensor itself, or a host buffer.

    A host buffer is used when the tensor is on a GPU, is not contiguous, or has another dtype. It
    is allocated with the first byte and released with the last. Several threads may write.

    Args:
        target: The tensor of the model.
        dtype: Dtype of the incoming bytes; by default the tensor's.
    """

    def __init__(self, target: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self._target = target.detach()
        self._dtype = dtype or target.dtype
        self._alike = target.dtype == self._dtype
        self._plain = self._alike and is_plain(self._target)
        self._left = target.numel() * self._dtype.itemsize
        self._filled = self._target if self._plain else _NOTHING
        """The tensor that receives the bytes: the model's tensor, or the host buffer."""
        self._memory: memoryview | None = None
        self._stream = (
            torch.cuda.stream(torch.cuda.current_stream(target.device))
            if target.is_cuda
            else nullcontext()
        )
        """Stream of the caller, so that the copy follows the GPU work that the caller submitted."""
        self._lock = threading.Lock()

    def memory_at(self, at: int, nbytes: int) -> memoryview:
        """Return the memory of ``nbytes`` row-major bytes from offset ``at``."""
        if self._memory is None:
            self._begin()
            self._memory = as_bytes(self._filled)
        return self._memory[at : at + nbytes]

    def bring(self, at: int, source: int, nbytes: int) -> None:
        """Copy verified bytes from an address to offset ``at``."""
        if not self._plain:
            self._begin()
        copy_bytes(self._filled.data_ptr() + at, source, nbytes)
        self.note_copied(nbytes)

    @property
    def device(self) -> torch.device:
        """Device of the model's tensor."""
        return self._target.device

    def copy(self, at: int, data: torch.Tensor) -> None:
        """Copy verified bytes from a device; for a target on a device they do not pass the host.

        Args:
            at: Offset in the tensor, in bytes.
            data: uint8 [bytes].
        """
        if self._alike and is_row_major(self._target):
            with torch.inference_mode(self._target.is_inference()):
                flat_bytes(self._target)[at : at + len(data)].copy_(data)
        else:
            as_buffer(self.memory_at(at, len(data))).copy_(data)
            self.note_copied(len(data))

    def note_copied(self, nbytes: int) -> None:
        """Count verified bytes; the last ones trigger the copy from the host buffer."""
        if self._plain:
            return
        with self._lock:
            self._left -= nbytes
            if not self._left:
                # Inference mode and current stream are per thread.
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
    """Slice of a part's tensor, or shard, that a tensor of the model needs."""

    offset: int
    """Offset of the tensor in the part, in bytes."""
    target: CopyTarget
    held: TensorSlice
    box: TensorSlice
    inner: TensorSlice
    itemsize: int


class ByteRange(NamedTuple):
    """Range of bytes that is contiguous in a part and in a tensor of the model."""

    begin: int
    """Offset in the chunk, in bytes."""
    nbytes: int
    target: CopyTarget
    at: int

    @property
    def memory(self) -> memoryview:
        """Memory that receives the bytes."""
        return self.target.memory_at(self.at, self.nbytes)


def plan_copies(
    targets: Mapping[str, torch.Tensor],
    manifests: Sequence[WeightManifest],
    wanted: Selection | None,
    *,
    cast: bool = False,
) -> list[list[PlannedSlice]]:
    """Plan the copies from each part into these tensors, in the order of the part's bytes.

    With ``cast``, floating-point tensors may have another dtype in the model.
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
    if (
        len(shards) == 1 and shards[0].entry.begins is None
    ):  # no shards: one piece is the whole tensor
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
    """Tell autograd that the parameters change."""
    torch.autograd.graph.increment_version(
        [one for one in module.parameters() if not one.is_inference()]
    )


def by_chunk(
    sizes: Sequence[int], plan: list[PlannedSlice]
) -> Iterator[tuple[int, list[ByteRange]]]:
    """Yield the number of each chunk that is needed, with the byte ranges to copy from it."""
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
