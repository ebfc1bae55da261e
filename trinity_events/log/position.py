"""Entry ids as positions: how they order, and the one before."""

from __future__ import annotations

ORIGIN = "0-0"
"""The position before the first entry."""


def position(entry_id: str) -> tuple[int, int]:
    """An entry id as numbers that compare. Raises ValueError for anything else."""
    milliseconds, _, number = entry_id.partition("-")
    if not (milliseconds.isdigit() and number.isdigit()):
        raise ValueError(f"{entry_id!r} is not an entry id such as 1700000000000-0")
    return int(milliseconds), int(number)


def before(entry_id: str) -> str:
    """The largest id below this one."""
    milliseconds, number = position(entry_id)
    if number:
        return f"{milliseconds}-{number - 1}"
    return f"{milliseconds - 1}-{2**64 - 1}" if milliseconds else ORIGIN
