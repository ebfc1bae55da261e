"""Arithmetic of ordinals as ranges: ascending, disjoint, each with its first and last ordinal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Range = tuple[int, int]


def ranges(ordinals: Iterable[int]) -> tuple[Range, ...]:
    """Return the ranges that cover ordinals, which may come in any order."""
    return tuple(union([(one, one) for one in ordinals]))


def ordinals(ranges: Iterable[Range]) -> Iterator[int]:
    """Yield each ordinal of the ranges."""
    for first, last in ranges:
        yield from range(first, last + 1)


def count(ranges: Iterable[Range]) -> int:
    """Return the number of ordinals in disjoint ranges."""
    return sum(last - first + 1 for first, last in ranges)


def union(*several: Iterable[Range]) -> list[Range]:
    """Return the ordinals of any of several sequences, whose ranges may overlap."""
    found: list[Range] = []
    for first, last in sorted(one for some in several for one in some):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found


def intersection(some: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Return the ordinals that two sequences of ranges share."""
    found: list[Range] = []
    at = other_at = 0
    while at < len(some) and other_at < len(others):
        (first, last), (other_first, other_last) = some[at], others[other_at]
        if max(first, other_first) <= min(last, other_last):
            found.append((max(first, other_first), min(last, other_last)))
        if last < other_last:
            at += 1
        else:
            other_at += 1
    return found


def difference(some: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Return the ordinals of ``some`` that ``others`` lack."""
    found: list[Range] = []
    taken = intersection(some, others)
    at = 0
    for first, last in some:
        start = first
        while at < len(taken) and taken[at][0] <= last:
            if start < taken[at][0]:
                found.append((start, taken[at][0] - 1))
            start = taken[at][1] + 1
            at += 1
        if start <= last:
            found.append((start, last))
    return found


def words_of_ranges(ranges: Sequence[Range], most: int = 16) -> str:
    """Return ranges in words, as ``3, 5 to 9``, with at most ``most`` of them named."""
    named = [f"{first}" if first == last else f"{first} to {last}" for first, last in ranges[:most]]
    more = count(ranges[most:])
    return ", ".join(named) + (f" and {more} more" if more else "")


def compact_ranges(ranges: Sequence[Range], most: int = 8) -> str:
    """Return ranges as one word, as ``3,5-9``, with at most ``most`` of them named."""
    named = [f"{first}" if first == last else f"{first}-{last}" for first, last in ranges[:most]]
    more = count(ranges[most:])
    return ",".join([*named, f"+{more}"] if more else named)
