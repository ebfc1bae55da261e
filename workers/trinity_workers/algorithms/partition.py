"""Partition of rows of different lengths: over ranks, and into micro-batches of bounded tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple


class RowSize(NamedTuple):
    """Tokens of a row; a part is as wide as its longest prompt and its longest response."""

    prompt: int
    response: int

    @property
    def tokens(self) -> int:
        """Tokens of the whole row."""
        return self.prompt + self.response


def padded_tokens(sizes: Sequence[RowSize]) -> int:
    """Return the tokens of a part of these rows, with its padding."""
    return len(sizes) * padded_size(sizes).tokens if sizes else 0


def padded_size(sizes: Sequence[RowSize]) -> RowSize:
    """Return the columns that rows of these sizes need."""
    return RowSize(max(size.prompt for size in sizes), max(size.response for size in sizes))


def least_parts(sizes: Sequence[RowSize], bound: int) -> int:
    """Return the number of parts of at most ``bound`` tokens that rows of these sizes need."""
    return sum(1 for _ in _filled(sizes, _longest_first(sizes), bound))


def partition(sizes: Sequence[RowSize], bound: int, count: int) -> list[list[int]]:
    """Return the rows of each of ``count`` parts; the parts of long rows come first.

    Rows of similar length are together, so that there is little padding. The largest part has as
    few tokens as a division of the sorted rows allows. No part has more than ``bound`` tokens,
    unless it is a single row. Parts are empty where there are fewer rows than parts.

    Args:
        sizes: Size of each row.
        bound: Maximum tokens of a part, with its padding.
        count: Number of parts, at least :func:`least_parts`.

    Raises:
        ValueError: if the rows need more parts.
    """
    order = _longest_first(sizes)
    if (needed := least_parts(sizes, bound)) > count:
        raise ValueError(f"rows that need {needed} parts of {bound} tokens do not fit into {count}")
    fits, short = bound, 0
    # Bisection finds the smallest bound: a larger one never needs more parts, as the greedy
    # division of an order into consecutive parts is the shortest.
    while fits - short > 1:
        middle = (fits + short) // 2
        if sum(1 for _ in _filled(sizes, order, middle)) <= count:
            fits = middle
        else:
            short = middle
    parts = list(_filled(sizes, order, fits))
    # Every rank must run the same number of passes, so spare ones make the largest smaller.
    while len(parts) < min(count, len(sizes)):
        _halve_the_largest(parts, sizes)
    return parts + [[] for _ in range(count - len(parts))]


def balance(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Return the items of each of ``count`` parts, whose sizes in all are nearly equal.

    The numbers of items differ by at most one. The sums of sizes differ by no more than the sizes
    of ``count`` items that are neighbours in order of size. The same sizes give the same parts.

    This is the balanced largest differencing method (Michiels, Korst, Aarts and van Leeuwen,
    "Performance ratios for the differencing method applied to the balanced number partitioning
    problem", STACS 2003): Karmarkar and Karp's, on tuples that have an item for each part. It
    searches no further for the best parts, as its complete variant does.

    Args:
        sizes: Size of each item, such as its tokens.
        count: Number of parts, at least 1. Some are empty where there are fewer items.
    """
    order = sorted(range(len(sizes)), key=lambda item: -sizes[item])
    tuples = []  # each with its spread, and its parts with their sums, the largest first
    for start in range(0, len(order), count):
        items = order[start : start + count]
        parts = [(sizes[item], [item]) for item in items]
        parts += [(0, [])] * (count - len(items))
        # The spread is negative, as a heap pops its smallest item. Ties go by `start`, which is
        # unique: the same sizes then give the same parts on all ranks.
        tuples.append((parts[-1][0] - parts[0][0], start, parts))
    heapify(tuples)
    while len(tuples) > 1:
        _, start, parts = heappop(tuples)
        _, _, others = heappop(tuples)
        joined = [
            (size + added, items + more)
            # The largest sum gets the smallest one: the differencing of Karmarkar and Karp.
            for (size, items), (added, more) in zip(parts, reversed(others), strict=True)
        ]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heappush(tuples, (joined[-1][0] - joined[0][0], start, joined))
    parts = tuples[0][2] if tuples else [(0, [])] * count
    return sorted((sorted(items) for _, items in parts), key=lambda items: (not items, items))


def places(parts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[int]:
    """Return the place of each row, where all parts are laid end to end.

    Args:
        parts: Rows of each part.
        lengths: Length of each part; it may have padding rows after its own.
    """
    starts = accumulate(lengths, initial=0)
    place_by_row = {
        row: start + i
        for start, part in zip(starts, parts, strict=False)
        for i, row in enumerate(part)
    }
    return [place_by_row[row] for row in range(len(place_by_row))]


def _longest_first(sizes: Sequence[RowSize]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda row: -sizes[row].tokens)


def _filled(sizes: Sequence[RowSize], order: Sequence[int], bound: int) -> Iterator[list[int]]:
    """Yield parts of consecutive rows, each with as many as the bound allows, and at least one."""
    part: list[int] = []
    width = RowSize(0, 0)
    for row in order:
        wider = padded_size([width, sizes[row]])
        # Padding counts: a pass is a rectangle, as wide as its longest prompt and response.
        if part and (len(part) + 1) * wider.tokens > bound:
            yield part
            part, wider = [], sizes[row]
        part.append(row)
        width = wider
    if part:
        yield part


def _halve_the_largest(parts: list[list[int]], sizes: Sequence[RowSize]) -> None:
    """Replace the part with most tokens, of those with several rows, by its two halves."""
    divisible = [index for index, part in enumerate(parts) if len(part) > 1]
    largest = max(divisible, key=lambda index: padded_tokens([sizes[row] for row in parts[index]]))
    middle = len(parts[largest]) // 2
    parts[largest : largest + 1] = [parts[largest][:middle], parts[largest][middle:]]
