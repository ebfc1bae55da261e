"""Formatting of times, also of years past 9999."""

from __future__ import annotations

from datetime import datetime

from ..log.position import LATEST

_CYCLE_YEARS = 400
_CYCLE = 146_097 * 86_400_000
"""Milliseconds in 400 years, after which the calendar repeats."""


def format_date_time(milliseconds: int | None) -> str:
    """Return the local date and time, of any year; a dash for None."""
    if milliseconds is None:
        return "-"
    # Python's dates end with the year 9999; the calendar repeats after 400 years.
    cycles = milliseconds // _CYCLE if milliseconds > LATEST else 0
    at = datetime.fromtimestamp((milliseconds - cycles * _CYCLE) / 1000)
    return f"{at.year + cycles * _CYCLE_YEARS:04d}-{at:%m-%d %H:%M:%S}"


def format_time(milliseconds: int) -> str:
    """Return the local time of the day; the whole date for a time past year 9999."""
    if milliseconds > LATEST:
        return format_date_time(milliseconds)
    return datetime.fromtimestamp(milliseconds / 1000).strftime("%H:%M:%S.%f")[:-3]
