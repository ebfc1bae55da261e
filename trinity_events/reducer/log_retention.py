"""Log retention: archive entries before the server trims them (invariant 8)."""

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
from .policy import ArchiveLimits

logger = logging.getLogger(__name__)


class LogRetention:
    """Archiver of a run's log: after each snapshot it archives entries, and then trims them.

    Args:
        log: The run's log.
        archive: The run's archive.
        token: Fencing token of the lead.
        limits: Sizes of segments, and of what stays on the server.
    """

    def __init__(
        self,
        log: RedisEventLog,
        archive: Archive,
        token: int,
        limits: ArchiveLimits = ArchiveLimits(),
    ) -> None:
        self._log = log
        self._archive = archive
        self._token = token
        self._limits = limits
        self.fault: str | None = None
        """Error for which the log is not archived now."""

    async def begin(self) -> None:
        """Remove unfinished segments, and set aside segments that belong to another log.

        A new leader calls this first. Only a former leader could add segments meanwhile, and the
        server refuses its commits and trims.
        """
        try:
            await anyio.to_thread.run_sync(self._archive.clear_up)
            for stream in Stream:
                await self._part_from_another_log(stream)
        except OSError as error:
            logger.error("the archive %s cannot be read: %s", self._archive.folder, error)

    async def _part_from_another_log(self, stream: Stream) -> None:
        last = await anyio.to_thread.run_sync(self._archive.through, stream)
        common, server_end = await common_part(self._archive, self._log, stream)
        if common == last:
            return
        aside = await anyio.to_thread.run_sync(self._archive.set_aside, stream, common, server_end)
        logger.error(
            "the server has no entry %s of the %s of %s, which was archived: it lost its data, or "
            "failed over to an older copy. The run continues from the server's last entry; the "
            "entries archived after %s are in %s",
            last,
            stream.value,
            self._log.run_id,
            common,
            aside,
        )

    async def __call__(self, position: str) -> bool:
        """Archive entries up to the position of a snapshot, then trim; return True on success.

        On a full disk it returns False, and trims nothing.
        """
        try:
            for stream in Stream:
                await self._archive_stream(stream, position)
        except OSError as error:
            if self.fault is None:
                logger.error(
                    "the log of %s cannot be archived to %s (%s): it stays on the server until "
                    "it can",
                    self._log.run_id,
                    self._archive.folder,
                    error,
                )
            self.fault = str(error)
            return False
        self.fault = None
        return True

    async def _archive_stream(self, stream: Stream, position: str) -> None:
        # No load of the state reads announcements, so all of them may go to the archive.
        through = position if stream is Stream.EVENTS else await self._log.last_id(stream)
        (after, after_gap), segment_count = await self._find_start(stream), 0
        while segment := await self._segment(stream, after, through):
            add = partial(self._archive.add, stream, segment, after, after_gap=after_gap)
            await anyio.to_thread.run_sync(add)
            after, after_gap, segment_count = segment[-1].id, False, segment_count + 1
            # A long backlog frees the server's memory on the way, and not at its end.
            if segment_count % self._limits.segments_per_trim == 0:
                await self._trim(stream, position)
        # After the segment is on the disk: no entry is ever in neither place (invariant 8).
        await self._trim(stream, position)

    async def _find_start(self, stream: Stream) -> tuple[str, bool]:
        """Return the entry before the next segment, and True if earlier entries may be missing."""
        after = await anyio.to_thread.run_sync(self._archive.through, stream)
        first_id = await self._log.first_retained_id(stream)
        if first_id is None or number(after) >= number(before(first_id)):
            return after, False
        # The run was archived elsewhere for a while: report the gap to the user.
        logger.error(
            "the %s of %s between %s and %s are not on the server any more and not in %s either: "
            "put the segments that have them there, or replay, export and verify will miss them",
            stream.value,
            self._log.run_id,
            after,
            first_id,
            self._archive.folder,
        )
        return before(first_id), True

    async def _trim(self, stream: Stream, position: str) -> None:
        entries, nbytes = self._limits.server_entries(stream), self._limits.server_bytes
        limit = await anyio.to_thread.run_sync(self._archive.trim_limit, stream, entries, nbytes)
        if limit is None:
            return
        if stream is Stream.EVENTS:
            # The archive may be ahead of a server that lost entries: unfolded entries stay.
            limit = min(limit, position, key=number)
        await self._log.trim(stream, limit, token=self._token)

    async def _segment(self, stream: Stream, after: str, through: str) -> list[Entry]:
        """Return the entries of the next segment; between two pages the fold can run."""
        segment: list[Entry] = []
        limits, nbytes = self._limits, 0
        page = PageSize(page_of(stream, limits.page_entries), limits.page_bytes)
        most = limits.segment_entries(stream)
        while len(segment) < most and nbytes < limits.segment_bytes:
            limit = page.limit
            entries = await self._log.read(after, stream=stream, through=through, limit=limit)
            segment += entries
            if len(entries) < limit:
                break
            page.learn(entries)
            after = entries[-1].id
            nbytes += sum(len(entry.payload) for entry in entries)
        return segment
