"""Arithmetic of ordinals as ranges: ascending, disjoint, each with its first and last ordinal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Range = tuple[int, int]


def ranges(ordinals: Iterable[int]) -> tuple[Range, ...]:
    """Return the ranges that cover ordinals, which may come in any order."""
    return tuple(union([(ordinal, ordinal) for ordinal in ordinals]))


def ordinals(ranges: Iterable[Range]) -> Iterator[int]:
    """Yield each ordinal of the ranges."""
    for first, last in ranges:
        yield from range(first, last + 1)


def count(ranges: Iterable[Range]) -> int:
    """Return the number of ordinals in disjoint ranges."""
    return sum(last - first + 1 for first, last in ranges)


def union(*several: Iterable[Range]) -> list[Range]:
    """Return the ordinals of any of several sequences, whose ranges may overlap."""
    result: list[Range] = []
    for first, last in sorted(span for spans in several for span in spans):
        # Neighbours join as well: fates that come in order stay one range.
        if result and first <= result[-1][1] + 1:
            result[-1] = result[-1][0], max(last, result[-1][1])
        else:
            result.append((first, last))
    return result


def intersection(ranges: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Return the ordinals that two sequences of ranges share."""
    overlaps: list[Range] = []
    at = other_at = 0
    while at < len(ranges) and other_at < len(others):
        (first, last), (other_first, other_last) = ranges[at], others[other_at]
        if max(first, other_first) <= min(last, other_last):
            overlaps.append((max(first, other_first), min(last, other_last)))
        # The range that ends first meets no later one of the other side.
        if last < other_last:
            at += 1
        else:
            other_at += 1
    return overlaps


def difference(ranges: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Return the ordinals of ``ranges`` that ``others`` lack."""
    result: list[Range] = []
    overlaps = intersection(ranges, others)
    at = 0
    for first, last in ranges:
        start = first
        while at < len(overlaps) and overlaps[at][0] <= last:
            if start < overlaps[at][0]:
                result.append((start, overlaps[at][0] - 1))
            start = overlaps[at][1] + 1
            at += 1
        if start <= last:
            result.append((start, last))
    return result


def format_ranges(ranges: Sequence[Range], most: int = 16) -> str:
    """Return ranges in words, as ``3, 5 to 9``, with at most ``most`` of them named."""
    named = [f"{first}" if first == last else f"{first} to {last}" for first, last in ranges[:most]]
    more = count(ranges[most:])
    return ", ".join(named) + (f" and {more} more" if more else "")


def compact_ranges(ranges: Sequence[Range], most: int = 8) -> str:
    """Return ranges as one word, as ``3,5-9``, with at most ``most`` of them named."""
    named = [f"{first}" if first == last else f"{first}-{last}" for first, last in ranges[:most]]
    more = count(ranges[most:])
    return ",".join([*named, f"+{more}"] if more else named)
