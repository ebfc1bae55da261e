"""Parts whose bytes lie in memory that the reader can look at."""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from .base import Check

_WORTH = 8 << 20
"""Bytes from which on several threads look at them."""
_MOST_THREADS = 4

Chunks: TypeAlias = list[tuple[int, memoryview]]
"""By their index in the part."""


def cut(
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


def look(chunks: Chunks, check: Check) -> None:
    """Have ``check`` see them all, in several threads where that pays."""
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    if threads == 1 or sum(len(data) for _, data in chunks) < _WORTH:
        _look(chunks, check)
        return
    share = -(-len(chunks) // threads)
    with ThreadPoolExecutor(threads) as pool:
        shares = [chunks[begin : begin + share] for begin in range(0, len(chunks), share)]
        for looked in [pool.submit(_look, one, check) for one in shares]:
            looked.result()


def _look(chunks: Chunks, check: Check) -> None:
    for index, data in chunks:
        check(index, data)
