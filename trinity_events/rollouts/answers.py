"""Reader of the stream of answers: it decodes entries, and keeps the stream able to take more.

1. Every entry is returned once, in order. A stream that began again is read from its beginning, and
   an :class:`Restarted` comes before its first entry.
2. No content of an entry raises; one that is no message of this run is an :class:`Unreadable`.
3. What one read has in memory is bounded by number and by bytes, but for one entry.
4. A stream whose newest id was chosen by a writer is deleted once all of it was read: the server
   gives no id after the largest one.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import NamedTuple

from trinity_schemas import (
    ContractError,
    Experience,
    ExperienceReference,
    ExperienceSender,
    ExperienceUnreadable,
    RewardErrorReported,
    decode_reward_error,
)
from trinity_schemas.codec import decode_experience, decode_reference
from trinity_schemas.identity import LONGEST_NAME

from ..log.position import LAST_ID, ORIGIN, is_from_a_clock, position
from ..server import Deadline
from .experience_checks import LONGEST_DETAIL
from .streams import RolloutStreams

_LONGEST_ID = 42
"""Characters of the longest entry id."""

logger = logging.getLogger(__name__)


class Sample(NamedTuple):
    """Experience that an explorer sent, or a reference to one; its content is not checked."""

    entry_id: str
    experience: Experience | ExperienceReference
    size: int
    """Bytes of its message."""

    @property
    def payload(self) -> str | None:
        """Name of the payload of its group; None for a sample that has its tokens."""
        if isinstance(self.experience, ExperienceReference):
            return self.experience.payload.name
        return None


class Failed(NamedTuple):
    """Message of an explorer that gave a request back."""

    entry_id: str
    request: str
    """Entry id of the request."""
    reason: str
    explorer: str = ""
    """Name that the explorer gives itself; empty if it gives none."""
    error: RewardErrorReported | None = None
    """Error of the reward, if that is what failed."""
    dependency: str = ""
    """Name of what the answer depends on, if that is what failed."""
    unreachable: bool = False
    """True if nothing of it answered."""


class Unreadable(NamedTuple):
    """Entry that is no message of this run."""

    entry_id: str
    reason: str
    sender: ExperienceSender | None = None
    """Explorer and request of the message, if that much is readable."""


class Restarted(NamedTuple):
    """Beginning of a new stream: further entries of the one before will not come."""


Answer = Sample | Failed | Unreadable | Restarted


class AnswerReader:
    """Reader of all answers of a run, in order, without a consumer group."""

    def __init__(self, streams: RolloutStreams) -> None:
        self._streams = streams
        self._cursor = ORIGIN
        self._mended = 0
        """Number of times that the stream was deleted."""

    async def next(self, wait: Deadline, block: float) -> list[Answer]:
        """Return the entries that arrive within ``block`` seconds."""
        return await self._read(wait, block)

    async def read_all(self, wait: Deadline) -> AsyncIterator[list[Answer]]:
        """Yield all entries that are there."""
        # Read before the entries: a position behind the cursor proves that the stream was deleted.
        newest, mended = await self._streams.newest_answer(wait), self._mended
        if position(newest) < position(self._cursor):
            self._cursor = ORIGIN
            # Before the new entries, whose samples must not complete a group of the old ones.
            yield [Restarted()]
        while answers := await self._read(wait):
            yield answers
        if self._mended == mended and not is_from_a_clock(newest):
            # The entry with this id was removed, so that it was not read.
            await self._mend(wait, newest)

    async def _read(self, wait: Deadline, block: float | None = None) -> list[Answer]:
        # An id that a writer chose may be the largest one, after which the server adds nothing.
        chosen = not is_from_a_clock(self._cursor)
        entries = []
        if self._cursor != LAST_ID:  # a server answers a read after this one with an error
            entries = await self._streams.answers_after(
                # Without blocking: after such an id no entry may ever come.
                wait,
                self._cursor,
                None if chosen else block,
            )
        if entries:
            # Before decoding: an entry that cannot be decoded is not read twice.
            self._cursor = entries[-1][0].decode()
        elif chosen:
            # Only after an empty read: a deletion before it would lose unread answers (invariant
            # 4).
            await self._mend(wait, self._cursor)
        return [self._decode(entry_id.decode(), fields) for entry_id, fields in entries]

    async def _mend(self, wait: Deadline, newest: str) -> None:
        if not await self._streams.mend_answers(wait, newest):
            return  # It has a later entry, which is read first.
        self._cursor = ORIGIN
        self._mended += 1
        if self._mended.bit_count() == 1:  # A writer may choose such ids all the time.
            logger.warning(
                "run %s: a writer gave an entry of the answers the id %s, after which the stream "
                "may take no more: all answers were read, and the stream begins again (time %d); "
                "see docs/security.md for who may write",
                *(self._streams.run_id, newest, self._mended),
            )

    def _decode(self, entry_id: str, fields: dict[bytes, bytes]) -> Answer:
        request = fields.get(b"failed")
        if request is not None:
            # Cut before decoding: UTF-8 has at most 4 bytes for a character, and explorers choose
            # the text.
            reason = fields.get(b"reason", b"")[: 4 * LONGEST_DETAIL].decode(errors="replace")
            explorer = fields.get(b"explorer", b"").decode(errors="replace")[:LONGEST_NAME]
            return Failed(
                entry_id,
                request[:_LONGEST_ID].decode(errors="replace"),
                reason,
                explorer,
                _decode_error(fields.get(b"error")),
                _decode_name(fields.get(b"dependency", b"")),
                fields.get(b"unreachable") == b"1",
            )
        # The script that reads leaves out the content of an entry above the limit.
        if (size := fields.get(b"large")) is not None:
            return Unreadable(entry_id, f"it has {size.decode()} bytes")
        payload = fields.get(b"r") or fields.get(b"e", b"")
        decode = decode_reference if b"r" in fields else decode_experience
        try:
            experience = decode(payload)
        except ExperienceUnreadable as error:
            # A message whose names are readable still counts against its explorer.
            return Unreadable(entry_id, str(error), error.sender)
        return Sample(entry_id, experience, len(payload))


def _decode_name(name: bytes) -> str:
    """Return the name of a dependency, which an explorer chooses, as one line of printable text."""
    text = name[: 4 * LONGEST_NAME].decode(errors="replace")
    return " ".join("".join(filter(str.isprintable, text)).split())[:LONGEST_NAME]


def _decode_error(payload: bytes | None) -> RewardErrorReported | None:
    """Return the error of a reward; None for a request that failed for another reason.

    An error that breaks the contract is another reason: its attempt counts, and nothing is shown.
    """
    if payload is None:
        return None
    try:
        return decode_reward_error(payload)
    except ContractError:
        return None
