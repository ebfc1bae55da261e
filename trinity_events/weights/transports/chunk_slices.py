"""Parts whose bytes lie in memory that the reader can look at."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TypeAlias

from ..threads import in_threads
from .base import Check

Chunks: TypeAlias = list[tuple[int, memoryview]]
"""By their index in the part."""


def cut_chunks(
    data: memoryview, sizes: Sequence[int], wanted: Container[int] | None, first: int = 0
) -> Chunks:
    """What is wanted of chunks that lie end to end; they are shorter where the memory is.

    Args:
        data: All of them.
        sizes: Their lengths.
        wanted: Which, by their index; None is all.
        first: Index of the first.
    """
    found, begin = [], 0
    for index, size in enumerate(sizes, first):
        if wanted is None or index in wanted:
            found.append((index, data[begin : begin + size]))
        begin += size
    return found


def check_chunks(chunks: Chunks, check: Check) -> None:
    """Have ``check`` see them all, in several threads where that pays."""

    def see(some: Sequence[tuple[int, memoryview]]) -> None:
        for index, data in some:
            check(index, data)

    in_threads(see, chunks, sum(len(data) for _, data in chunks))
