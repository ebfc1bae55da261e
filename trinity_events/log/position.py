"""Entry ids as positions: how they order, and the one before."""

from __future__ import annotations

ORIGIN = "0-0"
"""The position before the first entry."""
LAST_ID = f"{2**64 - 1}-{2**64 - 1}"
"""The largest id that there can be; a stream that has it takes no more entries."""
LATEST = 253_402_300_799_999
"""Milliseconds at which the year 9999 ends: ids above were chosen by their writer."""


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


def is_from_a_clock(entry_id: str) -> bool:
    """Return False for an id that only a writer who chose it can have made."""
    return position(entry_id)[0] <= LATEST
