"""Reader of one run, shared by all viewers: it indexes the log, follows it, and answers.

1. The commands that it sends to the server do not grow with the number of viewers.
2. ``version`` grows with each change of an answer. Nothing is queued for a viewer.
3. A fault of the server keeps the index: reading goes on from where it was.
4. Long work is done in turns of a few entries, or in a thread: other requests are answered between.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from typing import ClassVar, Literal, NamedTuple

import anyio
import anyio.lowlevel
import redis

from trinity_schemas import ContractError, Envelope, decode_envelope

from ..analysis.causes import LiveFacts
from ..core import MonitorState
from ..core.fold import Monitor
from ..errors import TrinityError
from ..log import DeadLetter, Entry, before, position
from ..log.page_size import PageSize, in_turns
from ..log.position import MalformedEntryId
from ..log.retry import backoff_delays, is_transient
from ..replay import PAGE, fold_one
from ..system.error_text import leaf_errors
from .history import History
from .sources import DashboardSource

logger = logging.getLogger(__name__)

# As long as a million entries take (decision 25).
_INDEXED_WITHIN = 20.0
"""Seconds for which a question waits until its entries are indexed."""
_LONGEST_PAUSE = 2.0
"""Maximum seconds between two attempts to reach a server."""
_FACTS_EVERY = 4.0
"""Seconds between two reads of the facts and dead letters of a run that is viewed."""
_TAIL = 20_000
"""Last entries whose timeline is shown while the index is far behind."""

Reached = Callable[[History], bool]
"""True if the index has reached the entries of a question."""


class NotIndexed(TrinityError):
    """The entries that a query is about are not indexed yet.

    Attributes:
        run_id: The run.
        progress: Share of its entries that are indexed; None if it cannot be read.
        problem: Reason why it cannot.
        deadline: Seconds that were waited for the first entries.
    """

    run_id: str
    progress: float | None = None
    problem: str | None = None
    deadline: float = 0.0

    def __str__(self) -> str:
        if self.progress is not None:
            return (
                f"{self.progress:.0%} of run {self.run_id} are indexed, and not the part that was "
                "asked for: try again in a moment"
            )
        late = f"run {self.run_id} could not be read in {self.deadline:.0f} s: try again"
        return self.problem or late


class InvalidQuery(TrinityError):
    """A parameter of a query is invalid.

    Attributes:
        fault: What it is not.
        value: Value of the parameter.
        name: Name of the parameter.
    """

    fault: Literal["number", "step", "type", "lane"]
    value: str = ""
    name: str = ""
    texts: ClassVar = {
        "number": "{name} is a number, and not {value!r}",
        "step": "this query needs a step, and one of a sample its ordinal and its number too",
        "type": "{value!r} is no type of events: see /api/runs/RUN/lanes",
        "lane": "{value!r} is no lane: name one such as trainer-0 or explorer:0-63",
    }


class UnknownEntry(TrinityError):
    """The log has no such entry.

    Attributes:
        fault: ``id`` for a text that is none, ``absent`` for an entry that is not in the log,
            ``number`` for one outside of the index, ``trimmed`` for those after a position.
        run_id: The run.
        entry_id: Id of the entry, or the position.
        number: Number of the entry.
        first: Number of the first entry of the index.
        last: Number of its last entry.
    """

    fault: Literal["id", "absent", "number", "trimmed"]
    run_id: str
    entry_id: str = ""
    number: int = 0
    first: int = 0
    last: int = 0
    texts: ClassVar = {
        "id": MalformedEntryId.text,
        "absent": "the log has no entry {entry_id}",
        "number": "run {run_id} has the entries {first} to {last}, and not {number}",
        "trimmed": "entries of run {run_id} after {entry_id} are no longer in the log",
    }


class At(NamedTuple):
    """State after an entry, with the entry and its announcements."""

    state: MonitorState
    number: int
    entry: Entry | None
    envelope: Envelope | None
    announcements: list[Envelope]
    problem: str | None
    """Reason for which the entry could not be decoded."""


class RunReader:
    """Index and follower of one run.

    All viewers share it: the commands that it sends do not grow with their number. A viewer is
    told of a change by :meth:`changed`, which keeps nothing for it.

    Args:
        source: The run's log.
        turn_entries: Entries that are indexed before others get their turn.
    """

    def __init__(self, source: DashboardSource, turn_entries: int) -> None:
        self.source = source
        self._turn_entries = turn_entries
        self.history: History | None = None
        self.tail: History | None = None
        """Index of the last entries alone, while that of the whole log is far behind."""
        self.facts: LiveFacts | None = None
        """Facts about processes and server, as of their last read."""
        self.dead_letters: Sequence[DeadLetter] = ()
        self.problem: str | None = None
        """Sentence on why the log cannot be read now."""
        self.note: str | None = None
        self.caught_up = False
        """True once the index has reached the end of the log."""
        self.end = 0
        """Milliseconds of the last entry that was known when the index began."""
        self.version = 0
        """Number of changes, which names a state of the answers."""
        self.viewers = 0
        self.used_at = 0.0
        self._change = anyio.Event()
        self._ahead: Monitor | None = None
        self._clock = (0, 0.0)

    async def run(self) -> None:
        """Index the log and follow it, until cancelled."""
        for pause in backoff_delays(_LONGEST_PAUSE):
            error: BaseException | None = None
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._follow_facts)
                    await self._follow()
            except* (redis.RedisError, OSError, TrinityError) as group:
                error = leaf_errors(group)[0]
            if error is not None:
                logger.warning("run %s: %s", self.source.run_id, error)
                self.problem = str(error)
                self._changed()
                # Another attempt would meet it again; the next viewer begins another reader.
                if not is_transient(error):
                    return
            await anyio.sleep(pause)

    async def _follow(self) -> None:
        if self.history is None:
            begun = await self.source.begin()
            self.note, self.end = begun.note, begun.end
            ahead = await self.source.newest_state()
            if ahead is not None and ahead.entries - begun.state.entries > PAGE:
                # Shown until the index is there: the reducer's snapshot is near the end of the log.
                self._ahead = Monitor(ahead)
            if self._ahead is not None or begun.entries > _TAIL:
                self.tail = await self._index_tail()
            self.history = History(begun.state, begun.begin, begun.end)
        self.problem = None
        page = PageSize(PAGE)
        # From where the index is: after a fault of the server it goes on, and begins nothing anew.
        while entries := await self.source.read(self.history.state.position, limit=page.limit):
            nbytes = page.learn(entries)
            await self._index(entries, nbytes)
        self.caught_up, self._ahead, self.tail = True, None, None
        self._changed()
        while True:
            entries = await self.source.wait(self.history.state.position)
            if entries:
                await self._index(entries, page.learn(entries))

    async def _index_tail(self) -> History | None:
        """Return an index of the last entries: their times, lanes and failures, and no state."""
        entries = await self.source.read_last(_TAIL)
        if not entries:
            return None
        begin, end = (position(entries[at].id)[0] for at in (0, -1))
        epoch = max((_read_epoch(entry) for entry in entries[-self._turn_entries :]), default=0)
        # Of the state, only the epoch matters: events of another one would count as anomalies.
        tail = History(MonitorState(run_id=self.source.run_id, epoch=epoch), begin, end)
        for batch in in_turns(
            entries, sum(len(entry.payload) for entry in entries), self._turn_entries
        ):
            tail.feed(batch)
            # Viewers are answered between two turns.
            await anyio.lowlevel.checkpoint()
        return tail

    async def _index(self, entries: list[Entry], nbytes: int) -> None:
        assert self.history is not None
        for batch in in_turns(entries, nbytes, self._turn_entries):
            self.history.feed(batch)
            await anyio.lowlevel.checkpoint()
        self.end = max(self.end, self.history.last)
        self._changed()

    async def _follow_facts(self) -> None:
        while True:
            # Facts cost commands of the server: a run that nothing shows is left alone.
            if self.viewers or self.facts is None or self._recently_used:
                self.dead_letters = await self.source.dead_letters()
                self.facts = await self.source.live_facts()
                self._clock = (self.facts.now, anyio.current_time())
                if self._ahead is not None:
                    await self._fold_ahead(self._ahead)
                self._changed()
            await anyio.sleep(_FACTS_EVERY)

    @property
    def _recently_used(self) -> bool:
        return anyio.current_time() - self.used_at < 2 * _FACTS_EVERY

    async def _fold_ahead(self, monitor: Monitor) -> None:
        """Fold the entries after the reducer's snapshot, while the index is far behind."""
        while entries := await self.source.read(monitor.state.position, limit=PAGE):
            monitor.fold(entries)
            if self.tail is not None:
                last = position(self.tail.state.position)
                # Its entries are read from the snapshot on, and the tail may be ahead of that.
                self.tail.feed([entry for entry in entries if position(entry.id) > last])
            await anyio.lowlevel.checkpoint()

    def _changed(self) -> None:
        self.version += 1
        self._change.set()
        # Replaced: an event of anyio cannot be cleared.
        self._change = anyio.Event()

    async def changed(self, version: int, seconds: float) -> int:
        """Wait until the answers are newer than a version, or seconds pass; return the version."""
        if self.version == version:
            with anyio.move_on_after(seconds):
                await self._change.wait()
        return self.version

    @property
    def now(self) -> int:
        """Milliseconds of the log's clock; those of the last entry for a recorded log."""
        if not self.source.is_live:
            return self.end
        at, since = self._clock
        return max(at + int((anyio.current_time() - since) * 1000), self.end) if at else self.end

    @property
    def newest(self) -> MonitorState | None:
        """Newest state that is known: of the index, or of the reducer while it is being built."""
        if self._ahead is not None:
            return self._ahead.state
        return None if self.history is None else self.history.state

    @property
    def progress(self) -> float:
        """Share of the log that is indexed, by time."""
        history = self.history
        if self.caught_up:
            return 1.0
        if history is None:
            return 0.0
        # Never 1: only `caught_up` says that nothing follows.
        return min(0.999, (history.last - history.begin) / max(1, self.end - history.begin))

    async def indexed(self) -> History:
        """Return the index once it has begun.

        Raises:
            NotIndexed: if it did not begin in time.
        """
        with anyio.move_on_after(_INDEXED_WITHIN):
            while self.history is None:
                if self.problem is not None:
                    break
                await self._change.wait()
        if self.history is None:
            raise NotIndexed(self.source.run_id, problem=self.problem, deadline=_INDEXED_WITHIN)
        return self.history

    async def find_number(self, entry_id: str) -> int:
        """Return the number of entries up to an entry, given by id.

        Raises:
            UnknownEntry: if the id is none, or the log has no such entry.
            NotIndexed: if the index does not reach it in time.
        """
        try:
            target = position(entry_id)
        except ValueError:
            raise UnknownEntry("id", self.source.run_id, entry_id) from None
        history = await self._reach(lambda history: position(history.state.position) >= target)
        return await self._find(history, target, exact=True)

    async def find_number_at(self, milliseconds: int) -> int:
        """Return the number of entries up to a moment."""
        history = await self._reach(lambda history: history.last >= milliseconds)
        return await self._find(history, (milliseconds, 2**64 - 1), exact=False)

    async def _find(self, history: History, target: tuple[int, int], *, exact: bool) -> int:
        blocks = history.blocks.all
        # Ids are in the order of the log, whatever the clock did.
        at = bisect_right(blocks, target, key=lambda block: position(block.first)) - 1
        if at < 0:
            if exact:
                raise UnknownEntry("absent", self.source.run_id, f"{target[0]}-{target[1]}")
            return history.first
        block = blocks[at]
        entries = await self.source.read(
            before(block.first), through=f"{target[0]}-{target[1]}", limit=block.entries
        )
        last = position(entries[-1].id) if entries else None
        if exact and last != target:
            raise UnknownEntry("absent", self.source.run_id, f"{target[0]}-{target[1]}")
        return block.number + len(entries)

    async def at(self, number: int) -> At:
        """Return the state after so many entries, folded from the last kept state before it.

        Raises:
            UnknownEntry: if the log has fewer entries, or the index begins later.
            NotIndexed: if the index does not reach it in time.
        """
        history = await self._reach(lambda history: history.number >= number)
        if not history.first <= number <= history.number:
            raise UnknownEntry(
                "number",
                self.source.run_id,
                number=number,
                first=history.first,
                last=history.number,
            )
        # The state before the last entry: that entry is folded by itself.
        base = history.states.before(max(history.first, number - 1))
        assert base is not None
        monitor = Monitor(base.decode())
        count = number - monitor.state.entries
        entries = await self.exactly(base.position, count)
        if not entries:
            return At(monitor.state, number, None, None, [], None)
        monitor.fold(entries[:-1])
        return At(monitor.state, number, *fold_one(monitor, entries[-1]))

    async def exactly(self, after: str, count: int) -> list[Entry]:
        """Return ``count`` entries after a position."""
        entries: list[Entry] = []
        while len(entries) < count:
            page = await self.source.read(after, limit=count - len(entries))
            if not page:
                raise UnknownEntry("trimmed", self.source.run_id, after)
            entries += page
            after = page[-1].id
        return entries

    async def _reach(self, reached: Reached) -> History:
        """Return the index once it has reached an entry, or the end of the log."""
        history = await self.indexed()
        with anyio.move_on_after(_INDEXED_WITHIN) as patience:
            while not (self.caught_up or reached(history)) and self.problem is None:
                await self._change.wait()
        if patience.cancelled_caught:
            raise NotIndexed(self.source.run_id, self.progress)
        return history

    async def pages(self, after: str, through: str) -> AsyncIterator[list[Entry]]:
        """Yield pages of the entries between two positions."""
        while page := await self.source.read(after, through=through, limit=PAGE):
            yield page
            after = page[-1].id

    async def wait_for_facts(self) -> None:
        """Wait until facts and dead letters were read once."""
        while self.facts is None and self.problem is None:
            await self.changed(self.version, 1.0)


def _read_epoch(entry: Entry) -> int:
    try:
        return decode_envelope(entry.payload).epoch
    except ContractError:
        return 0
