"""Slices of parts whose bytes are in memory that the reader can access."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TypeAlias

from ..threads import in_threads
from .base import Check

Chunks: TypeAlias = list[tuple[int, memoryview]]
"""Pairs of a chunk's index in the part and its bytes."""


def cut_chunks(
    data: memoryview, sizes: Sequence[int], indices: Container[int] | None, first: int = 0
) -> Chunks:
    """Return the wanted chunks of consecutive chunks; they are short where ``data`` ends early."""
    chunks, begin = [], 0
    for index, size in enumerate(sizes, first):
        if indices is None or index in indices:
            # A short slice is no error here: the check refuses it by its length.
            chunks.append((index, data[begin : begin + size]))
        begin += size
    return chunks


def check_chunks(chunks: Chunks, check: Check) -> None:
    """Call ``check`` for all chunks, in several threads if they are large."""

    def check_batch(batch: Sequence[tuple[int, memoryview]]) -> None:
        for index, data in batch:
            check(index, data)

    in_threads(check_batch, chunks, sum(len(data) for _, data in chunks))
