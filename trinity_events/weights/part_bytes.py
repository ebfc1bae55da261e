"""Bytes of a part, in the memory of its transport."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import add

import torch

from trinity_schemas import TensorEntry

from .errors import CorruptTensor
from .tensors import DTYPES, as_buffer


class PartBytes:
    """View of a part's bytes by offset; there may be several pieces, but no tensor spans two.

    Args:
        pieces: Consecutive pieces of the part.
    """

    def __init__(self, pieces: Sequence[memoryview | torch.Tensor]) -> None:
        self._pieces = [
            as_buffer(piece) if isinstance(piece, memoryview) else piece
            for piece in pieces
            if len(piece)
        ]
        self.on_host = all(piece.is_cpu for piece in self._pieces)
        """True if all bytes are in host memory."""
        # The pieces keep their memory alive, so that the addresses stay valid.
        self._addresses = [piece.data_ptr() for piece in self._pieces]
        self._typed: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        """Views of the pieces as elements of a dtype, by piece number and dtype."""
        self._ends = list(accumulate(len(piece) for piece in self._pieces))

    def address(self, begin: int, nbytes: int) -> int:
        """Return the address of a range of bytes. Raises CorruptVersion if it is not contiguous."""
        if not nbytes:
            return 0
        at, inside = self._find(begin, nbytes)
        return self._addresses[at] + inside

    def addresses(self, begins: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Return the addresses of many ranges of bytes. Raises as :meth:`address`."""
        # One check for all ranges, instead of a search for each.
        if len(self._pieces) == 1 and max(map(add, begins, sizes), default=0) <= self._ends[0]:
            return list(map(self._addresses[0].__add__, begins))
        return list(map(self.address, begins, sizes))

    def span(self, begin: int, nbytes: int) -> torch.Tensor:
        """Return a view of a range of bytes, uint8 [nbytes]. Raises as :meth:`address`."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        at, inside = self._find(begin, nbytes)
        return self._pieces[at][inside : inside + nbytes]

    def tensor(self, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a view of row-major elements from offset ``begin``. Raises as :meth:`address`.

        The result is a copy if the elements are not aligned to their size.
        """
        count, itemsize = math.prod(shape), dtype.itemsize
        if not count:
            return torch.empty(shape, dtype=dtype, device="cpu")
        at, inside = self._find(begin, count * itemsize)
        # Parts of this version align their tensors; files of other programs need not.
        if inside % itemsize or self._addresses[at] % itemsize:
            data = self._pieces[at][inside : inside + count * itemsize]
            return data.clone().view(dtype).view(shape)
        typed = self._typed.get((at, dtype))
        if typed is None:
            whole = self._pieces[at][: len(self._pieces[at]) // itemsize * itemsize]
            typed = self._typed[at, dtype] = whole.view(dtype)
        # One call of torch instead of three: a part may have very many tensors.
        return typed.as_strided(shape, _row_major(shape), inside // itemsize)

    def _find(self, begin: int, nbytes: int) -> tuple[int, int]:
        """Return the piece that holds a range of bytes, and the offset in it."""
        at = bisect_right(self._ends, begin)
        if at == len(self._ends) or begin + nbytes > self._ends[at]:
            raise CorruptTensor(fault="pieces", begin=begin, size=nbytes)
        return at, begin - (self._ends[at - 1] if at else 0)


def as_tensor(buffer: PartBytes, entry: TensorEntry) -> torch.Tensor:
    """Return the tensor that ``entry`` describes, a view if its alignment allows.

    Args:
        buffer: The part's bytes.
        entry: Entry of the tensor in the manifest.
    """
    return buffer.tensor(entry.offset, DTYPES[entry.dtype], entry.shape)


def _row_major(shape: tuple[int, ...]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]
