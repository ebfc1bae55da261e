"""Whether the log on a server is the one whose beginning is in an archive."""

from __future__ import annotations

from typing import NamedTuple

from ..log import ORIGIN, EventLog, Stream, before, position
from .segments import Archive


class Common(NamedTuple):
    """How far an archive and a server have the same log."""

    last: str
    """The newest archived entry that the server's log goes on from."""
    known: str
    """Up to which what is archived is of the server's log: that entry, or where the server begins,
    which has trimmed what was before."""


async def common_part(archive: Archive, log: EventLog, stream: Stream) -> Common:
    """How far they are the same.

    Up to the archive's last entry, unless the server lost its data, or was put back to, or failed
    over to, a copy that had less: then what was archived after it is of a log that is no more.
    """
    left: str | None = None
    for last in archive.ends(stream):
        if await log.read(before(last), stream=stream, through=last, limit=1):
            return Common(last, last)
        # Asked after the entry was not found: it may have been trimmed just then.
        left = await log.first_retained_id(stream)
        if left is not None and position(last) <= position(left):
            return Common(last, left)
    return Common(ORIGIN, left or ORIGIN)
