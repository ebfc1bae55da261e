"""Fields of a record of questions: by name, or by the path to a field within others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Final

ABSENT: Final = object()
"""Value of a field that a record does not have; a field may have the value None."""
_DEEPEST = 4
"""Levels of a record whose fields an error proposes."""
_MOST_NAMES = 20
"""Fields that an error names: a record may have thousands."""
# Names that are compared with the path: difflib is slow, and a record may have thousands.
_MOST_COMPARED = 1000


def read_field(record: Mapping[str, object], path: str) -> object:
    """Return the value of a field, or ABSENT.

    Args:
        record: The record.
        path: Name of the field, or a path such as `reward_model.ground_truth`. A name that has dots
            itself comes before the path.
    """
    # First: names of Parquet columns and of JSON may have dots themselves.
    if path in record:
        return record[path]
    # Each dot is tried: the names on the way may have dots, too.
    for place, letter in enumerate(path):
        inner = record.get(path[:place]) if letter == "." else None
        if isinstance(inner, Mapping):
            value = read_field(inner, path[place + 1 :])
            if value is not ABSENT:
                return value
    return ABSENT


def propose_field(record: Mapping[str, object], path: str) -> str:
    """Return the end of an error about an absent field: the nearest one, or those of the record."""
    paths = list(islice(_paths(record, _DEEPEST), _MOST_COMPARED))
    # Reversed, so that the first path with a name counts.
    by_name = {name.rpartition(".")[2]: name for name in reversed(paths)} | {
        name: name for name in paths
    }
    nearest = get_close_matches(path, by_name, n=1) or get_close_matches(
        path.rpartition(".")[2], by_name, n=1
    )
    if nearest:
        return f"did you mean {by_name[nearest[0]]!r}?"
    more = ", ..." if len(paths) > _MOST_NAMES else ""
    return f"it has {', '.join(paths[:_MOST_NAMES]) or 'no field'}{more}"


def _paths(record: Mapping[str, object], deepest: int) -> Iterator[str]:
    for name, value in record.items():
        yield str(name)
        if isinstance(value, Mapping) and deepest > 1:
            for inner in _paths(value, deepest - 1):
                yield f"{name}.{inner}"
