"""The bytes of a part, where its transport has them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from trinity_schemas import TensorEntry

from .tensors import DTYPES, as_buffer


class PartBytes:
    """Looked at by where they are in the part; they may lie in several pieces.

    Args:
        pieces: They follow each other in the part.
    """

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = [as_buffer(piece) for piece in pieces if len(piece)]
        self._addresses = [piece.data_ptr() for piece in self._pieces]
        self._begins = [0, *accumulate(len(piece) for piece in self._pieces)]
        self._ends = self._begins[1:]

    def runs(self, begin: int, nbytes: int) -> list[tuple[int, int]]:
        """Where so many bytes lie: addresses, and how many are there."""
        found = []
        for at, inside, here in self._find(begin, nbytes):
            found.append((self._addresses[at] + inside, here))
        return found

    def span(self, begin: int, nbytes: int) -> torch.Tensor:
        """So many bytes, uint8 [nbytes]: a view where they lie together, else a copy."""
        found = [
            self._pieces[at][inside : inside + here]
            for at, inside, here in self._find(begin, nbytes)
        ]
        if not found:
            return torch.empty(0, dtype=torch.uint8)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _find(self, begin: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Which pieces they are in: where they begin there, and how many there are."""
        at = bisect_right(self._ends, begin)
        while nbytes:
            here = min(nbytes, self._ends[at] - begin)
            yield at, begin - self._begins[at], here
            at, begin, nbytes = at + 1, begin + here, nbytes - here


def as_tensor(buffer: PartBytes, entry: TensorEntry) -> torch.Tensor:
    """The tensor that ``entry`` describes, a view of the part's bytes where that can be.

    Args:
        buffer: The part's bytes.
        entry: Where the tensor lies in it.
    """
    dtype = DTYPES[entry.dtype]
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    data = buffer.span(entry.offset, entry.nbytes)
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(entry.shape)
