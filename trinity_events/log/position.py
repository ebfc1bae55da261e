"""Entry ids as positions: their order, and the id before one."""

from __future__ import annotations

from ..errors import StructuredError

ORIGIN = "0-0"
"""Position before the first entry."""
LAST_ID = f"{2**64 - 1}-{2**64 - 1}"
"""Largest possible id; a stream with this id takes no more entries."""
LATEST = 253_402_300_799_999
"""Milliseconds at the end of year 9999; no server clock made an id above."""


class MalformedEntryId(StructuredError, ValueError):
    """A text is not an entry id.

    Attributes:
        entry_id: The text.
    """

    entry_id: str
    text = "{entry_id!r} is not an entry id such as 1700000000000-0"


def position(entry_id: str) -> tuple[int, int]:
    """Return an entry id as comparable numbers. Raises MalformedEntryId for any other text."""
    milliseconds, _, number = entry_id.partition("-")
    if not (milliseconds.isdigit() and number.isdigit()):
        raise MalformedEntryId(entry_id)
    # Numbers, since ids as texts would sort 10-0 before 9-0.
    return int(milliseconds), int(number)


def before(entry_id: str) -> str:
    """Return the largest id below this one."""
    milliseconds, number = position(entry_id)
    if number:
        return f"{milliseconds}-{number - 1}"
    return f"{milliseconds - 1}-{2**64 - 1}" if milliseconds else ORIGIN


def is_from_a_clock(entry_id: str) -> bool:
    """Return True unless the id is past year 9999, so that only a writer can have chosen it."""
    return position(entry_id)[0] <= LATEST
