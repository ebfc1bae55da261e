"""Slices of tensors: intersection, coverage, and the bytes of one slice inside another.

Pure arithmetic on whole numbers; dimensions are counted in elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

Shape = tuple[int, ...]


class TensorSlice(NamedTuple):
    """Slice of a tensor: its offset and its size in each dimension."""

    offsets: Shape
    shape: Shape

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def inside(self, outer: TensorSlice) -> tuple[slice, ...]:
        """Return the index of this slice in a tensor that holds ``outer``."""
        begins = [mine - its for mine, its in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(
            slice(begin, begin + size) for begin, size in zip(begins, self.shape, strict=True)
        )


class ShardOffset(NamedTuple):
    """Offset of a shard in each dimension, and the shape of the whole tensor."""

    begins: Shape
    global_shape: Shape


def full_slice(shape: Sequence[int]) -> TensorSlice:
    """Return the slice that is all of a tensor of this shape."""
    return TensorSlice((0,) * len(shape), tuple(shape))


def contains(outer: TensorSlice, box: TensorSlice) -> bool:
    """Return True if the slice lies inside another."""
    return len(outer.shape) == len(box.shape) and all(
        begin <= mine and mine + size <= begin + most
        for begin, most, mine, size in zip(*outer, *box, strict=True)
    )


def intersection(box: TensorSlice, other: TensorSlice) -> TensorSlice | None:
    """Return the intersection of two slices of one tensor; None if it is empty."""
    offsets, shape = [], []
    for begin, size, its_begin, its_size in zip(*box, *other, strict=True):
        low, high = max(begin, its_begin), min(begin + size, its_begin + its_size)
        if low >= high:
            return None
        offsets.append(low)
        shape.append(high - low)
    return TensorSlice(tuple(offsets), tuple(shape))


class CoverageFault(NamedTuple):
    """Fault of slices that do not cover another one exactly once."""

    twice_at: tuple[int, ...] | None = None
    """Index of an element that two of them have."""
    missing: int = 0
    """Number of elements that none of them has."""
    volume: int = 0

    def __str__(self) -> str:
        if self.twice_at is not None:
            return f"it comes twice at {list(self.twice_at)}"
        return f"{self.missing} of {self.volume} elements are missing"


def coverage_error(target: TensorSlice, boxes: Sequence[TensorSlice]) -> CoverageFault | None:
    """Return why these slices do not cover the wanted one exactly once; None if they do."""
    parts = sorted(
        part for part in (intersection(target, box) for box in boxes) if part is not None
    )
    # Sorted by the first dimension: only slices that begin before this one ends can meet it.
    for index, part in enumerate(parts):
        end = part.offsets[0] + part.shape[0] if part.shape else 1
        for other in parts[index + 1 :]:
            if other.offsets and other.offsets[0] >= end:
                break
            if intersection(part, other) is not None:
                return CoverageFault(twice_at=max(part.offsets, other.offsets))
    # Parts without an overlap cover the target exactly if their volumes add up.
    missing = target.volume - sum(part.volume for part in parts)
    return CoverageFault(missing=missing, volume=target.volume) if missing else None


def contiguous_runs(
    source_box: TensorSlice, outer: TensorSlice, inner: TensorSlice, itemsize: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of bytes of ``inner`` that are contiguous in two row-major tensors.

    The source tensor holds ``source_box``, the target tensor holds ``outer``. Each run is its
    offset in the source, its offset in the target, and its size in bytes, in ascending order.
    """
    if not inner.volume:
        return
    if source_box == outer == inner:
        yield 0, 0, itemsize * inner.volume
        return
    # After this dimension all three have the same shape, so that the elements are contiguous.
    last = len(inner.shape)
    while last and inner.shape[last - 1] == source_box.shape[last - 1] == outer.shape[last - 1]:
        last -= 1
    # One dimension more than equal ones is contiguous: its part is a range of whole rows.
    split = max(0, last - 1)
    places = [
        [
            (offset - begin, itemsize * math.prod(box.shape[index + 1 :]))
            for index, (offset, begin) in enumerate(zip(inner.offsets, box.offsets, strict=True))
        ]
        for box in (source_box, outer)
    ]
    firsts = [sum(begin * stride for begin, stride in place) for place in places]
    nbytes = itemsize * math.prod(inner.shape[split:])
    for steps in product(*(range(size) for size in inner.shape[:split])):
        source, target = (
            first + sum(step * stride for step, (_, stride) in zip(steps, place, strict=False))
            for first, place in zip(firsts, places, strict=True)
        )
        yield source, target, nbytes


def find_chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the begin and the size of one of ``parts`` even chunks, cut as torch cuts them.

    The last chunks may be shorter, or empty.
    """
    # torch.chunk rounds up, so that the last chunks are the short ones.
    most = -(-size // parts)
    begin = min(size, most * index)
    return begin, min(size, begin + most) - begin


def byte_spans(
    outer: TensorSlice, inner: TensorSlice, itemsize: int, gap: int
) -> Iterator[tuple[int, int]]:
    """Yield the spans of the bytes of ``inner`` in a row-major tensor that holds ``outer``.

    Each span is ``(begin, end)``, in ascending order. Spans less than ``gap`` bytes apart are
    merged: a read is never smaller than that.
    """
    strides = [itemsize * math.prod(outer.shape[index + 1 :]) for index in range(len(outer.shape))]
    starts = [mine - its for mine, its in zip(inner.offsets, outer.offsets, strict=True)]

    def span(dimension: int, base: int) -> Iterator[tuple[int, int]]:
        rest = range(dimension, len(strides))
        first = base + sum(starts[index] * strides[index] for index in rest)
        reach = sum((inner.shape[index] - 1) * strides[index] for index in rest)
        # Within one step of this dimension no two bytes are further apart than its stride.
        if dimension == len(strides) or strides[dimension] <= gap or _dense(dimension):
            yield first, first + reach + itemsize
            return
        for step in range(inner.shape[dimension]):
            yield from span(dimension + 1, base + (starts[dimension] + step) * strides[dimension])

    def _dense(dimension: int) -> bool:
        return inner.shape[dimension + 1 :] == outer.shape[dimension + 1 :]

    if inner.volume:
        yield from span(0, 0)
