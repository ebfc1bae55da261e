"""Keeping the log before it is trimmed (invariant 8)."""

from __future__ import annotations

import logging
from functools import partial

import anyio.to_thread

from ..archive.continuation import common_part
from ..archive.segments import Archive
from ..log import Entry, PageSize, RedisEventLog, Stream
from ..log import position as number
from ..log.position import before
from ..replay import page_of

logger = logging.getLogger(__name__)

SEGMENT_ENTRIES = {Stream.EVENTS: 5_000, Stream.ANNOUNCEMENTS: 1_000}
"""The most of a segment; an announcement lists what it rests on, and is larger than an event."""
LEFT_ENTRIES = SEGMENT_ENTRIES.copy()
"""What stays on the server at least, for followers that are behind and ranks that publish seldom:
a segment may be of one entry."""
SEGMENT_BYTES = 32 << 20
"""A segment is no longer than the page with which it has so many; all of it is in memory."""
_TRIM_EVERY = 10
"""Segments of a long backlog; the server does nothing else while it trims."""


class LogRetention:
    """Archives a run's entries after each snapshot, then trims what the archive holds.

    Args:
        log: The run's log.
        archive: The run's files.
        token: The fencing token of our lead.
    """

    def __init__(self, log: RedisEventLog, archive: Archive, token: int) -> None:
        self._log = log
        self._archive = archive
        self._token = token
        self._failing = False

    async def begin(self) -> None:
        """Take out of the archive what is not of the log that the server has.

        And what a leader that was killed while it archived has left. For a leader that begins:
        nobody adds to the archive meanwhile, or only one that leads no more, and is refused.
        """
        try:
            await anyio.to_thread.run_sync(self._archive.clear_up)
            for stream in Stream:
                await self._part_from_another_log(stream)
        except OSError as error:
            logger.error("the archive %s cannot be looked at: %s", self._archive.folder, error)

    async def _part_from_another_log(self, stream: Stream) -> None:
        last = await anyio.to_thread.run_sync(self._archive.through, stream)
        common, known = await common_part(self._archive, self._log, stream)
        if common == last:
            return
        aside = await anyio.to_thread.run_sync(self._archive.set_aside, stream, common, known)
        logger.error(
            "the server has no entry %s of the %s of %s, which was archived: it lost its data, or "
            "failed over to a copy that had less. The run goes on from what the server has; what "
            "was archived after %s is in %s",
            last,
            stream.value,
            self._log.run_id,
            common,
            aside,
        )

    async def __call__(self, position: str) -> bool:
        """Archive up to the position of a snapshot; whether that was possible.

        On a full disk it is not, and nothing is trimmed.
        """
        try:
            for stream in Stream:
                await self._keep(stream, position)
        except OSError as error:
            if not self._failing:
                logger.error(
                    "the log of %s cannot be archived to %s (%s): it stays on the server until "
                    "it can",
                    self._log.run_id,
                    self._archive.folder,
                    error,
                )
            self._failing = True
            return False
        self._failing = False
        return True

    async def _keep(self, stream: Stream, position: str) -> None:
        through = position if stream is Stream.EVENTS else await self._log.last_id(stream)
        (after, after_gap), kept = await self._goes_on(stream), 0
        while found := await self._segment(stream, after, through):
            add = partial(self._archive.add, stream, found, after, after_gap=after_gap)
            await anyio.to_thread.run_sync(add)
            after, after_gap, kept = found[-1].id, False, kept + 1
            if kept % _TRIM_EVERY == 0:
                await self._trim(stream, position)
        await self._trim(stream, position)

    async def _goes_on(self, stream: Stream) -> tuple[str, bool]:
        """After which entry the next segment is, and whether something may be missing before it."""
        after = await anyio.to_thread.run_sync(self._archive.through, stream)
        left = await self._log.first_retained_id(stream)
        if left is None or number(after) >= number(before(left)):
            return after, False
        # A run that was archived elsewhere for a while: who reads this is to be told.
        logger.error(
            "the %s of %s between %s and %s are not on the server any more and not in %s either: "
            "put the segments that have them there, or replay, export and verify will miss them",
            stream.value,
            self._log.run_id,
            after,
            left,
            self._archive.folder,
        )
        return before(left), True

    async def _trim(self, stream: Stream, position: str) -> None:
        limit = await anyio.to_thread.run_sync(
            self._archive.trim_limit, stream, LEFT_ENTRIES[stream]
        )
        if limit is None:
            return
        if stream is Stream.EVENTS:
            # An archive may be ahead of a server that lost its end: what is yet to fold stays.
            limit = min(limit, position, key=number)
        await self._log.trim(stream, limit, token=self._token)

    async def _segment(self, stream: Stream, after: str, through: str) -> list[Entry]:
        """The next entries to keep; page by page, so that the folding has its turns."""
        segment: list[Entry] = []
        page, nbytes = PageSize(page_of(stream)), 0
        while len(segment) < SEGMENT_ENTRIES[stream] and nbytes < SEGMENT_BYTES:
            limit = page.limit
            found = await self._log.read(after, stream=stream, through=through, limit=limit)
            segment += found
            if len(found) < limit:
                break
            page.learn(found)
            after = found[-1].id
            nbytes += sum(len(entry.payload) for entry in found)
        return segment
