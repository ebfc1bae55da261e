"""Keeping the log before it is trimmed (invariant 8)."""

from __future__ import annotations

import logging

import anyio.to_thread

from ..archive.segments import Archive
from ..core import MonitorState
from ..log import RedisEventLog, Stream

logger = logging.getLogger(__name__)

SEGMENT_ENTRIES = 10_000


class Retention:
    """Archives a run's entries after each snapshot, then trims what the archive holds."""

    def __init__(self, log: RedisEventLog, archive: Archive) -> None:
        self._log = log
        self._archive = archive

    async def __call__(self, state: MonitorState) -> None:
        """Archive up to the snapshot of ``state``; on a full disk, nothing is trimmed."""
        try:
            for stream in Stream:
                await self._keep(stream, state)
        except OSError as error:
            logger.error(
                "the log of %s cannot be archived to %s (%s): it stays on the server",
                state.run_id,
                self._archive.folder,
                error,
            )

    async def _keep(self, stream: Stream, state: MonitorState) -> None:
        through = state.position if stream is Stream.EVENTS else await self._log.last_id(stream)
        after = await anyio.to_thread.run_sync(self._archive.through, stream)
        while found := await self._log.read(
            after, stream=stream, through=through, limit=SEGMENT_ENTRIES
        ):
            await anyio.to_thread.run_sync(self._archive.add, stream, found, after)
            after = found[-1].id
        limit = await anyio.to_thread.run_sync(self._archive.trim_limit, stream)
        if limit is not None:
            await self._log.trim(stream, limit)
