"""Differences between two JSON documents, such as two states of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from .expressions import format_path


class Change(Struct, frozen=True, kw_only=True):
    """Value of a document that differs from that of another; None for one that is absent."""

    path: str
    """Names and indexes that lead to it, as in a condition of :mod:`.expressions`."""
    before: Any
    after: Any


def changes(before: Any, after: Any, path: tuple[str, ...] = ()) -> Iterator[Change]:
    """Yield the innermost values that differ, in the order of the documents."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in [*before, *(name for name in after if name not in before)]:
            yield from changes(before.get(name), after.get(name), (*path, str(name)))
    # Of equal lengths alone: after an insertion all places behind it would differ.
    elif _is_list(before) and _is_list(after) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from changes(old, new, (*path, str(number)))
    elif before != after:
        yield Change(path=format_path(path), before=before, after=after)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
