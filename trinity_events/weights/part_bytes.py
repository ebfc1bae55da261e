"""The bytes of a part, where its transport has them."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from trinity_schemas import TensorEntry

from ..errors import CorruptVersion
from .tensors import DTYPES, as_buffer


class PartBytes:
    """Looked at by where they are in the part; they may lie in several pieces, no tensor in two.

    Args:
        pieces: They follow each other in the part.
    """

    def __init__(self, pieces: Sequence[memoryview | torch.Tensor]) -> None:
        self._pieces = [
            as_buffer(piece) if isinstance(piece, memoryview) else piece
            for piece in pieces
            if len(piece)
        ]
        self.on_host = all(piece.is_cpu for piece in self._pieces)
        """Whether they lie in the host's memory."""
        self._addresses = [piece.data_ptr() for piece in self._pieces]
        self._typed: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        """The pieces again, by their number, as elements of a dtype."""
        self._ends = list(accumulate(len(piece) for piece in self._pieces))

    def address(self, begin: int, nbytes: int) -> int:
        """Where so many bytes lie. Raises CorruptVersion when they do not lie together."""
        if not nbytes:
            return 0
        at, inside = self._find(begin, nbytes)
        return self._addresses[at] + inside

    def span(self, begin: int, nbytes: int) -> torch.Tensor:
        """A view of so many bytes, uint8 [nbytes]. Raises as :meth:`address`."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        at, inside = self._find(begin, nbytes)
        return self._pieces[at][inside : inside + nbytes]

    def tensor(self, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of the elements that begin there, row-major. Raises as :meth:`address`.

        A copy where they are not aligned to their size.
        """
        count, itemsize = math.prod(shape), dtype.itemsize
        if not count:
            return torch.empty(shape, dtype=dtype, device="cpu")
        at, inside = self._find(begin, count * itemsize)
        if inside % itemsize or self._addresses[at] % itemsize:
            found = self._pieces[at][inside : inside + count * itemsize]
            return found.clone().view(dtype).view(shape)
        typed = self._typed.get((at, dtype))
        if typed is None:
            whole = self._pieces[at][: len(self._pieces[at]) // itemsize * itemsize]
            typed = self._typed[at, dtype] = whole.view(dtype)
        # One call of torch's for what takes three in steps: there may be very many tensors.
        return typed.as_strided(shape, _row_major(shape), inside // itemsize)

    def _find(self, begin: int, nbytes: int) -> tuple[int, int]:
        """Which piece they are in, and where."""
        at = bisect_right(self._ends, begin)
        if at == len(self._ends) or begin + nbytes > self._ends[at]:
            raise CorruptVersion(
                f"{nbytes} bytes from {begin} on, which are a tensor, do not lie together"
            )
        return at, begin - (self._ends[at - 1] if at else 0)


def as_tensor(buffer: PartBytes, entry: TensorEntry) -> torch.Tensor:
    """The tensor that ``entry`` describes, a view of the part's bytes where alignment allows.

    Args:
        buffer: The part's bytes.
        entry: Where the tensor lies in it.
    """
    return buffer.tensor(entry.offset, DTYPES[entry.dtype], entry.shape)


def _row_major(shape: tuple[int, ...]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]
