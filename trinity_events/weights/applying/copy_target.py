"""Destinations of the bytes of a version in a model that is filled chunk by chunk."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import NamedTuple

import torch

from ..tensors import as_buffer, as_bytes, copy_bytes, flat_bytes, is_plain, is_row_major
from .copy_plan import CopyPlan, PartPlan

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
        # Autograd refuses writes in place to a leaf that requires gradients.
        self._target = target.detach()
        self._dtype = dtype or target.dtype
        self._alike = target.dtype == self._dtype
        self._plain = self._alike and is_plain(self._target)
        # Counted, because chunks end in any order, in several threads.
        self._remaining_bytes = target.numel() * self._dtype.itemsize
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

    def write(self, at: int, source: int, nbytes: int) -> None:
        """Copy verified bytes from an address to offset ``at``."""
        # Its memory exists from the start; a host buffer is allocated with the first byte.
        if not self._plain:
            self._begin()
        copy_bytes(self._filled.data_ptr() + at, source, nbytes)
        self.count_copied(nbytes)

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
                flat_bytes(self._target)[at : at + len(data)].copy_(data)  # uint8 (bytes,)
        else:
            as_buffer(self.memory_at(at, len(data))).copy_(data)
            self.count_copied(len(data))

    def count_copied(self, nbytes: int) -> None:
        """Count verified bytes; the last ones trigger the copy from the host buffer."""
        if self._plain:
            return
        with self._lock:
            self._remaining_bytes -= nbytes
            if not self._remaining_bytes:
                # Inference mode and current stream are per thread.
                mode = torch.inference_mode(self._target.is_inference())
                with mode, torch.no_grad(), self._stream:
                    self._target.copy_(self._filled)
                # Released at once, so that a load holds host memory for few tensors at a time.
                self._filled, self._memory = _NOTHING, None

    def _begin(self) -> None:
        with self._lock:
            if self._filled is _NOTHING:
                shape = self._target.shape
                self._filled = torch.empty(shape, dtype=self._dtype, device="cpu")


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


def about_to_change(module: torch.nn.Module) -> None:
    """Inform autograd that the parameters change."""
    # Copies by address are hidden from autograd: a later backward would use changed weights
    # unnoticed.
    torch.autograd.graph.increment_version(
        [parameter for parameter in module.parameters() if not parameter.is_inference()]
    )


def copy_targets(plan: CopyPlan) -> dict[str, CopyTarget]:
    """Return a destination for each tensor of a plan, by name; it serves one version."""
    targets: dict[str, CopyTarget] = {}
    for planned in chain.from_iterable(part.in_order() for part in plan.parts):
        name = planned.entry.name
        if name not in targets:
            targets[name] = CopyTarget(planned.target, planned.dtype)
    return targets


def by_chunk(
    sizes: Sequence[int], plan: PartPlan, targets: Mapping[str, CopyTarget]
) -> Iterator[tuple[int, list[ByteRange]]]:
    """Yield the number of each chunk that is needed, with the byte ranges to copy from it.

    Args:
        sizes: Sizes of the chunks of a part, in bytes.
        plan: Copies from the part.
        targets: Destination of each tensor, by name.
    """
    index, begin = -1, 0
    end = 0
    ranges: list[ByteRange] = []
    for planned in plan.in_order():
        target = targets[planned.entry.name]
        for run in planned.runs():
            first, at, remaining = run
            while remaining:
                # Chunks without wanted bytes are passed over, and never read.
                while first >= end:
                    if ranges:
                        yield index, ranges
                        ranges = []
                    index += 1
                    begin, end = end, end + sizes[index]
                here = min(remaining, end - first)
                ranges.append(ByteRange(first - begin, here, target, at))
                first, at, remaining = first + here, at + here, remaining - here
    if ranges:
        yield index, ranges
