"""Which bytes of a part belong where in a model, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .boxes import Box, runs
from .tensors import as_bytes, is_plain


class Landing:
    """Where the bytes of one tensor of the model go: to itself, or to memory beside it.

    Such memory is there from the tensor's first byte to its last, for one that is on a GPU, or
    whose elements do not lie together.
    """

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target.detach()
        self._left = target.nbytes
        self._beside: torch.Tensor | None = None
        self._memory: memoryview | None = None

    @property
    def memory(self) -> memoryview:
        """All of it, row-major."""
        if self._memory is None:
            if not is_plain(self._target):
                self._beside = torch.empty(self._target.shape, dtype=self._target.dtype)
            self._memory = as_bytes(self._target if self._beside is None else self._beside)
        return self._memory

    def landed(self, nbytes: int) -> None:
        """So many bytes more are there, and verified."""
        self._left -= nbytes
        if not self._left:
            if self._beside is not None:
                with torch.no_grad():
                    self._target.copy_(self._beside)
            self._beside = self._memory = None


class Some(NamedTuple):
    """What of a part's tensor, or shard, belongs into the model's."""

    offset: int
    """Of the tensor in the part."""
    landing: Landing
    held: Box
    box: Box
    inner: Box
    itemsize: int


class Run(NamedTuple):
    """Bytes that lie together in a part, and in a tensor of the model."""

    begin: int
    """In the part, or in a chunk of it."""
    nbytes: int
    landing: Landing
    at: int

    @property
    def room(self) -> memoryview:
        """Where they go."""
        return self.landing.memory[self.at : self.at + self.nbytes]


def by_chunk(sizes: Sequence[int], plan: list[Some]) -> Iterator[tuple[int, list[Run]]]:
    """Chunks of which something is wanted, and what, by where it begins in them."""
    index, begin = -1, 0
    end = 0
    found: list[Run] = []
    for offset, landing, held, box, inner, itemsize in plan:
        for source, target, nbytes in runs(held, box, inner, itemsize):
            first, at, left = offset + source, target, nbytes
            while left:
                while first >= end:
                    if found:
                        yield index, found
                        found = []
                    index += 1
                    begin, end = end, end + sizes[index]
                here = min(left, end - first)
                found.append(Run(first - begin, here, landing, at))
                first, at, left = first + here, at + here, left - here
    if found:
        yield index, found
