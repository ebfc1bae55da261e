"""Encoding of a delta as positions and values: pure functions on bytes.

Elements are compared by their bits, so that NaN, -0.0 and every dtype are exact. A delta holds
the changed elements block by block, each block's positions in the smallest of three forms: the
gaps between them in bytes, the gaps in pairs of bytes, or one bit for each element of the block.
Applying it overwrites elements, so that applying it twice gives the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ..errors import CorruptDelta

Words = npt.NDArray[Any]
"""A tensor's elements as unsigned integers of their size, [elements]."""
Positions = npt.NDArray[Any]
"""Positions in a block, rising, int64 or uint32 [changed]."""

BLOCK = 1 << 18
"""Elements of a block: part of the format. A block fits in the processor's cache."""

# Little-endian on every host: the bytes are part of the format.
_WORDS: dict[int, np.dtype[Any]] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_HEADER = np.dtype([("form", "u1"), ("changed", "<u4"), ("position_bytes", "<u4")])
_GAPS: dict[int, np.dtype[Any]] = {0: np.dtype("u1"), 1: np.dtype("<u2")}
_BITS = 2


class Changes(NamedTuple):
    """The changed elements of one block."""

    start: int
    """Index of the block's first element in the tensor."""
    positions: Positions
    values: Words


def words(data: memoryview, itemsize: int) -> Words:
    """Return bytes as elements of ``itemsize`` bytes, a view of the same memory."""
    return np.frombuffer(data, np.uint8).view(_WORDS[itemsize])


def blocks(elements: int) -> range:
    """Return the first element of each block of a tensor with ``elements`` elements."""
    return range(0, elements, BLOCK)


def encode_delta(changes: list[Changes], elements: int, itemsize: int) -> bytes:
    """Encode the delta of a tensor from the changes of its blocks."""
    header = np.zeros(len(blocks(elements)), _HEADER)
    sections: list[bytes] = []
    for start, positions, values in changes:
        form, coded = _encode_positions(positions, min(BLOCK, elements - start))
        header[start // BLOCK] = (form, len(positions), len(coded))
        sections += (coded, values.astype(_WORDS[itemsize], copy=False).tobytes())
    return b"".join((header.tobytes(), *sections))


def decode_delta(delta: memoryview, elements: int, itemsize: int) -> Iterator[Changes]:
    """Yield the changes block by block; blocks without changes are left out.

    Each allocation is bounded by the size of a block, even for corrupt bytes.

    Args:
        delta: Output of :func:`encode_delta`.
        elements: Elements of the tensor.
        itemsize: Bytes of one element.

    Raises:
        CorruptVersion: when the bytes are not a delta of such a tensor.
    """
    count = -(-elements // BLOCK)
    offset = count * _HEADER.itemsize
    if offset > len(delta):
        raise CorruptDelta(fault="table")
    header = np.frombuffer(delta[:offset], _HEADER)
    # int64: a sum of uint32 of a corrupt table could wrap, and match the length.
    block_bytes = header["changed"].sum(dtype=np.int64) * itemsize
    block_bytes += header["position_bytes"].sum(dtype=np.int64)
    if offset + int(block_bytes) != len(delta):
        raise CorruptDelta(fault="size", actual=len(delta), expected=offset + int(block_bytes))
    # Numbers of Python: arithmetic with those of NumPy could wrap.
    for index, (form, changed, position_bytes) in enumerate(header.tolist()):
        if not changed and not position_bytes:
            continue
        start = index * BLOCK
        end = offset + position_bytes
        size = min(BLOCK, elements - start)
        positions = _decode_positions(delta[offset:end], form, changed, size)
        offset = end + changed * itemsize
        yield Changes(start, positions, np.frombuffer(delta[end:offset], _WORDS[itemsize]))


def overwrite(target: Words, delta: memoryview) -> None:
    """Write the changed elements into ``target``, [elements] of the tensor's own element size.

    Raises:
        CorruptVersion: as :func:`decode_delta`; the blocks before the corrupt one are written.
    """
    for start, positions, values in decode_delta(delta, len(target), target.itemsize):
        target[start : start + BLOCK][positions] = values


def digest_with(base: Words, delta: memoryview) -> str:
    """Return the digest that ``base`` would have after :func:`overwrite`. Nothing is written.

    Raises:
        CorruptVersion: as :func:`decode_delta`.
    """
    hasher, done = xxhash.xxh3_128(), 0
    for start, positions, values in decode_delta(delta, len(base), base.itemsize):
        # Block by block: the result is digested without a copy of the tensor.
        hasher.update(base[done:start].data)
        # A copy of one block, since nothing may be written to the base.
        block = base[start : start + BLOCK].copy()
        block[positions] = values
        hasher.update(block.data)
        done = start + len(block)
    hasher.update(base[done:].data)
    return f"xxh3:{hasher.hexdigest()}"


def _encode_positions(positions: Positions, size: int) -> tuple[int, bytes]:
    """Encode positions in the smallest of the three forms."""
    gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1  # (changed,)
    lengths = {form: _length(gaps, dtype) for form, dtype in _GAPS.items()}
    form = min(lengths, key=lengths.__getitem__)
    # One bit for each element is the smallest form of a dense change.
    if lengths[form] > -(-size // 8):
        mask = np.zeros(size, bool)
        mask[positions] = True
        return _BITS, np.packbits(mask, bitorder="little").tobytes()
    return form, _encode_gaps(gaps, _GAPS[form])


def _length(gaps: Positions, dtype: np.dtype[Any]) -> int:
    most = np.iinfo(dtype).max
    escapes = int((gaps // most).sum()) if len(gaps) and gaps.max() >= most else 0
    return (len(gaps) + escapes) * dtype.itemsize


def _encode_gaps(gaps: Positions, dtype: np.dtype[Any]) -> bytes:
    """Encode gaps; the dtype's largest number stands for that many unchanged elements."""
    most = np.iinfo(dtype).max
    # Place of the last number of each gap; the escapes lie before it.
    ends = np.cumsum(gaps // most + 1) - 1
    coded = np.full(int(ends[-1]) + 1 if len(ends) else 0, most, dtype)
    coded[ends] = gaps % most
    return coded.tobytes()


def _decode_positions(coded: memoryview, form: int, changed: int, size: int) -> Positions:
    """Decode ``changed`` rising positions below ``size``."""
    if changed > size:
        raise CorruptDelta(fault="changes", actual=changed, expected=size)
    if form == _BITS:
        positions = _decode_bits(coded, size)
    elif form in _GAPS:
        positions = _decode_gaps(coded, _GAPS[form], size)
    else:
        raise CorruptDelta(fault="form", actual=form)
    # The last one is the largest: gaps are never negative.
    if len(positions) != changed or (changed and int(positions[-1]) >= size):
        raise CorruptDelta(fault="positions")
    return positions


def _decode_bits(coded: memoryview, size: int) -> Positions:
    if len(coded) != -(-size // 8):
        raise CorruptDelta(fault="bits", actual=len(coded), expected=size)
    return np.flatnonzero(np.unpackbits(np.frombuffer(coded, np.uint8), bitorder="little"))


def _decode_gaps(coded: memoryview, dtype: np.dtype[Any], size: int) -> Positions:
    """Decode gaps; each number but the largest ends a gap, so that a position follows."""
    # Corrupt bytes must not allocate more than a block needs.
    if len(coded) > 2 * size + 2 or len(coded) % dtype.itemsize:
        raise CorruptDelta(fault="gaps")
    gaps = np.frombuffer(coded, dtype)
    ends = np.flatnonzero(gaps != np.iinfo(dtype).max)
    reached: Positions = np.cumsum(gaps, dtype=np.int64)[ends]
    # Each earlier position takes one element more than the gaps say.
    return reached + np.arange(len(reached))
