"""Reader of the stream of answers: it puts samples together to groups."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

from trinity_schemas import ContractError, Experience
from trinity_schemas.codec import decode_experience

from ..log.position import position
from ..server import Deadline
from .dispatch_state import Group
from .streams import ANSWERS_AT_ONCE, RolloutStreams

Entry = tuple[bytes, dict[bytes, bytes]]


class Failed(NamedTuple):
    """Message of an explorer that gave a request back."""

    entry_id: str
    request: str
    """Entry id of the request."""
    reason: str


class Useless(NamedTuple):
    """Entry that is no message of this run."""

    entry_id: str


class AnswerReader:
    """Reader of all answers of a run, in order, without a consumer group."""

    def __init__(self, streams: RolloutStreams) -> None:
        self._streams = streams
        self._cursor = "0-0"
        self._partial: dict[tuple[int, int, int], dict[int, tuple[str, Experience]]] = {}

    async def next(self, wait: Deadline, block: float) -> list[Group | Failed | Useless]:
        """Return what arrives within ``block`` seconds."""
        return list(self._sort(await self._streams.answers_after(wait, self._cursor, block)))

    async def rest(self, wait: Deadline) -> AsyncIterator[list[Group | Failed | Useless]]:
        """Yield everything that is there, and read anew a stream that began anew."""
        newest = await self._streams.newest_answer(wait)
        if position(newest) < position(self._cursor):
            self._cursor = "0-0"
            self._partial.clear()
        while True:
            entries = await self._streams.answers_after(wait, self._cursor)
            yield list(self._sort(entries))
            if len(entries) < ANSWERS_AT_ONCE:
                return

    def _sort(self, entries: list[Entry]) -> Iterator[Group | Failed | Useless]:
        for entry_id, fields in entries:
            self._cursor = entry_id.decode()
            request = fields.get(b"failed")
            if request is not None:
                reason = fields.get(b"reason", b"").decode(errors="replace")
                yield Failed(self._cursor, request.decode(errors="replace"), reason)
                continue
            try:
                experience = decode_experience(fields.get(b"e", b""))
            except ContractError:
                yield Useless(self._cursor)
                continue
            if experience.run_id != self._streams.run_id:
                yield Useless(self._cursor)
            elif (group := self._add(self._cursor, experience)) is not None:
                yield group

    def _add(self, entry_id: str, experience: Experience) -> Group | None:
        """Return the group of a sample if the sample is its last one."""
        name = experience.epoch, experience.ordinal, experience.attempt
        samples = self._partial.setdefault(name, {})
        samples[experience.sample] = entry_id, experience
        if len(samples) < experience.samples:
            return None
        del self._partial[name]
        ordered = [samples[index] for index in sorted(samples)]
        return Group(
            ordinal=experience.ordinal,
            attempt=experience.attempt,
            experiences=[sample for _, sample in ordered],
            entry_ids=[one for one, _ in ordered],
        )
