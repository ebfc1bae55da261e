"""Parser of moments: a clock time, a time ago, or an entry id."""

from __future__ import annotations

import re
from datetime import datetime, time

from ..errors import TrinityError
from ..log import position

_AGO = re.compile(r"(\d+(?:\.\d+)?)(s|min|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
# Both parts are unsigned numbers of 64 bits, of which the largest has 20 digits.
_ENTRY = re.compile(r"\d{1,20}-\d{1,20}")


class BadTime(TrinityError):
    """The text is not a moment.

    Attributes:
        given: The text.
    """

    given: str
    text = (
        "{given!r} is no moment: give a time such as 18:29, '2026-11-22 18:29', 10m (ago), or an "
        "entry id as tail prints them"
    )


def moment(text: str, now: int, *, end: bool = False) -> tuple[int, int]:
    """Return the position of a moment.

    Args:
        text: An entry id; a time ago, such as ``10m``; a time of today, such as ``18:29``; or a
            day with or without a time, such as ``2026-11-22 18:29``, in local time.
        now: Milliseconds of the server's clock.
        end: True to place the position after all entries of its millisecond.

    Raises:
        BadTime: if it is none of these.
    """
    if _ENTRY.fullmatch(text):
        return position(text)
    if match := _AGO.fullmatch(text):
        milliseconds = now - int(float(match[1]) * _SECONDS[match[2]] * 1000)
    else:
        milliseconds = int(_by_the_clock(text, now).timestamp() * 1000)
    # The server numbers the entries of a millisecond from 0 to this.
    return max(0, milliseconds), 2**64 - 1 if end else 0


def _by_the_clock(text: str, now: int) -> datetime:
    try:
        # Today is the server's day, in the time zone of the user.
        return datetime.combine(datetime.fromtimestamp(now / 1000).date(), time.fromisoformat(text))
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise BadTime(text) from None
