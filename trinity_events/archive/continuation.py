"""Comparison of a run's archive with the log on the server."""

from __future__ import annotations

from typing import NamedTuple

from ..log import ORIGIN, EventLog, Stream, before, position
from .segments import Archive


class Common(NamedTuple):
    """Common part of an archive and the log on a server."""

    last: str
    """Newest archived entry that the server's log continues."""
    through: str
    """Last entry up to which the archive is known to be of the server's log.

    It is ``last``, or the entry before the first one on a server that trimmed its log.
    """


async def common_part(archive: Archive, log: EventLog, stream: Stream) -> Common:
    """Return how far the archive and the server's log agree.

    They agree up to the archive's last entry, unless the server lost its data or returned to an
    older copy. Later archived entries then belong to a log that no longer exists.
    """
    first_retained: str | None = None
    # Newest first: what the server does not have at the end is of a log that is gone.
    for last in archive.ends(stream):
        if await log.read(before(last), stream=stream, through=last, limit=1):
            return Common(last, last)
        # Read this after the entry was not found: the server may have trimmed it just then.
        first_retained = await log.first_retained_id(stream)
        # Trimmed, and not lost: a server trims only what is archived (invariant 8).
        if first_retained is not None and position(last) <= position(first_retained):
            return Common(last, first_retained)
    return Common(ORIGIN, first_retained or ORIGIN)
