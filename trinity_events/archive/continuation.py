"""Whether the log on a server is the one whose beginning is in an archive."""

from __future__ import annotations

from ..log import ORIGIN, EventLog, Stream, before, position
from .segments import Archive


async def goes_on_from(archive: Archive, log: EventLog, stream: Stream) -> str:
    """The newest archived entry that the server's log goes on from.

    That is the archive's last one, unless the server lost its data, or was put back to, or failed
    over to, a copy that had less: then what was archived after it is of a log that is no more.
    """
    left = await log.first_left(stream)
    for last in archive.ends(stream):
        trimmed = left is not None and position(last) <= position(left)
        if trimmed or await log.read(before(last), stream=stream, through=last, limit=1):
            return last
    return ORIGIN
