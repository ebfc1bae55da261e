"""Cursor of a reader in a stream, which detects that following entries were lost."""

from __future__ import annotations

import math
from typing import Literal

import anyio

from ..errors import EntriesLost
from ..log import ORIGIN, EventLog, Stream, before, position

CHECK_EVERY = 0.1
"""Seconds between two checks of a cursor; a failover of the server takes longer."""


class StreamCursor:
    """Position of a reader in a stream, whose loss raises an error.

    The entry that was read last must still exist. If it does not, the log was trimmed past it, or
    the server lost its end: it lost its data, or failed over to a replica that had less.

    Args:
        log: The log that is read.
        stream: The stream of the log.
        after: The position.
        asked_for: True if the subscriber named the position, and so wants all that follows. False
            if it is the beginning or end of the stream at the time of the subscription.
    """

    def __init__(self, log: EventLog, stream: Stream, after: str, *, asked_for: bool) -> None:
        self.after = after
        self._log = log
        self._stream = stream
        # The end of the stream at the time of the subscription is an entry that is there.
        self._read = not asked_for and after != ORIGIN
        # From the beginning means from what is there: nothing is missing before the first entry.
        self._anywhere = not asked_for and after == ORIGIN
        # A position that a subscriber named is checked before the first read: it may be trimmed.
        self._check_at = -math.inf if asked_for else anyio.current_time() + CHECK_EVERY

    def passed(self, entry_id: str) -> None:
        """Advance to an entry that was read."""
        self.after = entry_id
        self._read = True
        self._anywhere = False

    async def check(self, *, now: bool = False) -> None:
        """Raise LogLost if following entries may be lost; ask the server seldom unless ``now``."""
        if self._anywhere or not (now or anyio.current_time() >= self._check_at):
            return
        await self._find_lost()
        self._check_at = anyio.current_time() + CHECK_EVERY

    async def _find_lost(self) -> None:
        # The usual case costs one read of one entry.
        if self._read and await self._there():
            return
        first_retained = await self._log.first_retained_id(self._stream)
        if first_retained is not None and position(self.after) < position(before(first_retained)):
            raise self._lost("trimmed", first_retained, before(first_retained))
        # A stream that was trimmed to nothing has no last entry, but retains its last id.
        end = max(await self._log.last_id(self._stream), first_retained or ORIGIN, key=position)
        if position(end) < position(self.after) and not await self._is_in_another_stream():
            raise self._lost("shortened", end)
        # Read again: of a stream that was trimmed to nothing, only `first_retained` has the last
        # entry.
        if self._read and self.after != first_retained and not await self._there():
            raise self._lost("rewritten", end)

    async def _is_in_another_stream(self) -> bool:
        """Return True if the position asked for is within another stream of the run.

        `tail` prints the entries of both streams, and one clock makes their ids.
        """
        ends = [] if self._read else [await self._log.last_id(stream) for stream in Stream]
        return any(position(self.after) <= position(end) for end in ends)

    async def _there(self) -> bool:
        return bool(
            await self._log.read(
                before(self.after), stream=self._stream, limit=1, through=self.after
            )
        )

    def _lost(
        self, fault: Literal["trimmed", "shortened", "rewritten"], end: str, resume: str = ""
    ) -> EntriesLost:
        return EntriesLost(self._log.run_id, fault, self._stream.value, self.after, end, resume)
