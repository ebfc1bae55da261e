"""State of a run, folded from its log: at the last commit, now, or at any entry."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from typing import ClassVar, Literal, NamedTuple

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import msgspec
from msgspec import Struct

from trinity_schemas import ContractError, Envelope, EnvelopeReader, decode_envelope

from .core import Monitor, MonitorState, decode_state
from .core.fold import Decode, decode_entry
from .errors import TrinityError
from .log import ORIGIN, Entry, EventLog, PageSize, Stream, SyncEventLog, position
from .log.page_size import TURN, in_turns

logger = logging.getLogger(__name__)

PAGE = 1000
"""Most events of one read."""


class Folded(NamedTuple):
    """One folded entry with its announcements; ``envelope`` is None for a dead letter."""

    entry: Entry
    envelope: Envelope | None
    announcements: list[Envelope]
    problem: str | None = None
    """Reason for which a dead letter could not be decoded."""


class SnapshotUnreadable(TrinityError):
    """The state of a run cannot be loaded from its server alone.

    Attributes:
        run_id: The run.
        reason: What is wrong with the snapshot.
        trimmed: Entry up to which the log is trimmed.
        archived: Last entry of the archive; None without one.
    """

    run_id: str
    reason: str
    trimmed: str
    archived: str | None
    text = (
        "run {run_id}: {reason}, its log is trimmed up to {trimmed} and {_have}: put the missing "
        "segments back into the log folder of the run's checkpoint directory, or use the version "
        "of trinity-events that wrote the snapshot"
    )

    @property
    def _have(self) -> str:
        if self.archived is None:
            return "no archive was found"
        return f"its archive ends at {self.archived}"


class UntilNotFound(TrinityError):
    """The log lacks the entry or step to stop at.

    Attributes:
        until: The entry or step.
        fault: ``step`` or ``entry`` if the log ends before it, ``invalid`` if it is neither.
        run_id: The run.
        position: Last entry of the log.
        trainer_step: Last step of the log.
    """

    until: str
    fault: Literal["step", "entry", "invalid"]
    run_id: str = ""
    position: str = ""
    trainer_step: int | None = None
    texts: ClassVar = {
        "step": "step {until} was not reached: the log of run {run_id} ends at {position}, with "
        "step {trainer_step}",
        "entry": "entry {until} was not reached: the log of run {run_id} ends at {position}, with "
        "step {trainer_step}",
        "invalid": "give a step, such as 40, or an entry id as tail prints them: {until!r} is "
        "neither",
    }


def page_of(stream: Stream, events: int = PAGE) -> int:
    """Return the most entries of one read of a stream.

    An announcement lists its saves or parts: that of 2,048 ranks is as large as a page of events.

    Args:
        stream: The stream.
        events: Most entries of one read of events.
    """
    return events if stream is Stream.EVENTS else max(1, events // 20)


async def read_all(
    log: EventLog, stream: Stream = Stream.EVENTS, after: str = ORIGIN
) -> AsyncIterator[Entry]:
    """Yield every entry between a position and the current end of a stream, oldest first."""
    # Up to the end of now: a busy run appends faster than a slow reader reads.
    end, page = await log.last_id(stream), PageSize(page_of(stream))
    while entries := await log.read(after, stream=stream, through=end, limit=page.limit):
        page.learn(entries)
        for entry in entries:
            yield entry
        after = entries[-1].id


def announced(log: SyncEventLog, after: str = ORIGIN) -> Iterator[Entry]:
    """Yield the announcements after a position, oldest first, up to the current end."""
    stream = Stream.ANNOUNCEMENTS
    page = PageSize(page_of(stream))
    while True:
        limit = page.limit
        entries = log.read(after, stream=stream, limit=limit)
        page.learn(entries)
        yield from entries
        if len(entries) < limit:
            return  # a short page: over a slow network, no page of a busy run is empty
        after = entries[-1].id


class Work(Struct):
    """Amount of folding since the last snapshot, which a new leader repeats."""

    entries: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Loaded(NamedTuple):
    """Result of :func:`load_monitor`."""

    monitor: Monitor
    position: str
    """Committed position on the server; the log may end before it."""
    began: str
    """Position at which folding began: of the snapshot, or the end of the archive."""
    silent: Work
    """Amount of folding after ``began``, without announcements."""


Archived = Callable[[str], Iterator[Entry]]
"""Reader of the archived events after a position."""


async def load_monitor(
    log: EventLog, archived: Archived | None = None, page: PageSize | None = None
) -> Loaded:
    """Load the monitor at the log's committed position.

    Loads the last snapshot and folds the entries up to the position. Their announcements are
    already in the log, and are dropped. If this version cannot read the snapshot, the whole log
    is folded, with the archive for trimmed entries. A log that ends before the position is
    folded to its end.

    Args:
        log: The run's log.
        archived: Reads the archived events after a position.
        page: Size of one read; by default that of every reader.
    """
    snapshot, reached = await log.load()
    through = await _reachable(log, reached)
    monitor = Monitor(await _load_state(log, snapshot, through, archived))
    state, silent, decode = monitor.state, Work(), EnvelopeReader().decode
    page = page or PageSize(PAGE)
    # A snapshot may be of a later entry than a log that lost its end.
    began = min(state.position, through, key=position)
    while position(state.position) < position(through):
        entries = await log.read(state.position, through=through, limit=page.limit)
        nbytes = page.learn(entries)
        if not entries:
            logger.error(
                "the log of %s has no entry %s, which was folded before: entries after %s are lost",
                log.run_id,
                through,
                state.position,
            )
            break
        began_at = anyio.current_time()
        for batch in in_turns(entries, nbytes):
            monitor.fold(batch, decode)
            await anyio.lowlevel.checkpoint()
        silent.seconds += anyio.current_time() - began_at
        silent.entries += len(entries)
        silent.bytes += nbytes
    # Even if the snapshot is ahead: new ids are only above the end of the log.
    state.position = through
    return Loaded(monitor, reached, began, silent)


async def _reachable(log: EventLog, reached: str) -> str:
    """Return the committed position, or the end of a log that lost entries."""
    end = await log.last_id()
    if position(end) >= position(reached):
        return reached
    logger.error(
        "the log of %s ends at %s and has no entry %s, which was folded before: the server failed "
        "over or lost its data; the entries between are lost, and the run continues from there",
        log.run_id,
        end,
        reached,
    )
    return end


async def _load_state(
    log: EventLog, snapshot: bytes | None, reached: str, archived: Archived | None
) -> MonitorState:
    state, why = MonitorState(run_id=log.run_id), "there is no snapshot"
    first_retained = await log.first_retained_id(Stream.EVENTS)

    def covers(state: MonitorState) -> bool:
        """Return True if the remaining log has every entry after a state."""
        if first_retained is None:
            return True
        return (
            position(state.position)
            >= min(position(first_retained), position(reached))
            > position(ORIGIN)
        )

    if snapshot is not None:
        try:
            decoded = decode_state(snapshot)
            if covers(decoded):
                return decoded
            why = f"the snapshot is of {decoded.position}"
        except msgspec.DecodeError as error:
            why = f"the snapshot is not readable ({error})"
        logger.warning("run %s: rebuilding the state from the log (%s)", log.run_id, why)
    if first_retained is None:
        return state
    if archived is not None:
        # In a thread, so that the event loop can renew the lead.
        state = await anyio.to_thread.run_sync(_refold, archived, log.run_id, reached)
    if covers(state):
        return state
    if snapshot is None and state.position == ORIGIN:
        logger.error(
            "run %s: %s, and its log begins at %s: earlier entries are lost, and the run "
            "continues with the remaining ones",
            log.run_id,
            why,
            first_retained,
        )
        return state
    end = None if archived is None else state.position
    raise SnapshotUnreadable(log.run_id, why, first_retained, end)


def _refold(archived: Archived, run_id: str, reached: str) -> MonitorState:
    monitor, decode = Monitor(MonitorState(run_id=run_id)), EnvelopeReader().decode
    for number, entry in enumerate(archived(ORIGIN)):
        if position(entry.id) > position(reached):
            break
        monitor.fold([entry], decode)
        # A thread cannot be cancelled; it has to ask.
        if number % TURN == 0:
            anyio.from_thread.check_cancelled()
    return monitor.state


async def current_state(log: EventLog, archived: Archived | None = None) -> MonitorState:
    """Return the state after the newest entry, folded from the snapshot or the archive."""
    monitor = (await load_monitor(log, archived)).monitor
    # Stop at the current end: a busy run appends faster than a slow network reads.
    async for entry in read_all(log, after=monitor.state.position):
        monitor.fold([entry])
    return monitor.state


class Followed(NamedTuple):
    """State of a run that goes on, with the entries that were folded since the last one."""

    state: MonitorState
    folded: list[Folded]


async def follow_state(
    log: EventLog, archived: Archived | None = None, *, seconds: float = 1.0
) -> AsyncGenerator[Followed, None]:
    """Yield the state now, then again after new entries, or after ``seconds`` without any.

    The state goes on with the next entries: copy what must stay. Only reads from the server.
    """
    state = await current_state(log, archived)
    monitor, decode, page = Monitor(state), EnvelopeReader().decode, PageSize(PAGE)
    yield Followed(state, [])
    while True:
        pairs = await log.read_blocking(
            {Stream.EVENTS: state.position}, seconds=seconds, limit=page.limit
        )
        entries = [entry for _, entry in pairs]
        page.learn(entries)
        yield Followed(state, [fold_one(monitor, entry, decode) for entry in entries])


def fold_one(monitor: Monitor, entry: Entry, decode: Decode = decode_envelope) -> Folded:
    """Fold one entry, and return it with its envelope for display."""
    try:
        envelope = decode_entry(monitor.state.run_id, entry.payload, decode)
    except ContractError as error:
        # A dead letter counts as folded, or replay and reducer would have other positions.
        monitor.set_aside(entry.id, error)
        return Folded(entry, None, [], str(error))
    return Folded(entry, envelope, monitor.apply(entry.id, envelope))


def fold_each(state: MonitorState, entries: Iterable[Entry]) -> Iterator[Folded]:
    """Fold entries into a state, and yield each as soon as it is folded."""
    monitor, decode = Monitor(state), EnvelopeReader().decode
    for entry in entries:
        yield fold_one(monitor, entry, decode)


class Replay:
    """Fold of a log from its beginning to an entry or a step.

    Args:
        run_id: The run.
        until: Id of the last entry to fold, or a step to fold up to its first announcement; None
            folds the whole log.
    """

    def __init__(self, run_id: str, until: str | None = None) -> None:
        self.monitor = Monitor(MonitorState(run_id=run_id))
        self._decode = EnvelopeReader().decode
        self._until_id = self._until_step = None
        if until is not None:
            # A step has digits alone, and an entry id a dash.
            if until.isascii() and until.isdigit():
                self._until_step = int(until)
            else:
                self._until_id = checked_entry(until)
        self._until = until
        self.finished = until is None

    @property
    def wants_more(self) -> bool:
        """True until the stop entry or step is reached."""
        return self._until is None or not self.finished

    @property
    def state(self) -> MonitorState:
        """State after the entries folded so far."""
        return self.monitor.state

    def feed(self, entries: Iterable[Entry]) -> list[Folded]:
        """Fold entries up to the stop entry or step."""
        folded: list[Folded] = []
        for entry in entries:
            if not self.wants_more:
                break
            # An id of a stream is a time: no entry needs to have exactly this one.
            if self._until_id is not None and position(entry.id) > position(self._until_id):
                self.finished = True
                break
            result = fold_one(self.monitor, entry, self._decode)
            folded.append(result)
            if self._until_id == entry.id or self._settles(result.announcements):
                self.finished = True
        return folded

    def _settles(self, announcements: list[Envelope]) -> bool:
        return self._until_step is not None and any(
            is_about(announcement.event, self._until_step) for announcement in announcements
        )

    def check_finished(self) -> None:
        """Raise UntilNotFound if the log ended before the stop entry or step."""
        if not self.finished and not (
            self._until_id is not None and position(self.state.position) >= position(self._until_id)
        ):
            raise until_not_reached(
                "entry" if self._until_step is None else "step", str(self._until), self.state
            )


def until_not_reached(
    fault: Literal["step", "entry"], until: str, end: MonitorState
) -> UntilNotFound:
    """Return the error for a log that ends before an entry or step."""
    return UntilNotFound(until, fault, end.run_id, end.position, end.trainer_step)


def is_about(announcement: object, step: int) -> bool:
    """Return True if an announcement tells the outcome of a kind of a step."""
    return hasattr(announcement, "kind") and getattr(announcement, "step", None) == step


def checked_entry(entry_id: str) -> str:
    """Return a valid entry id. Raises UntilNotFound for any other text."""
    try:
        position(entry_id)
    except ValueError:
        raise UntilNotFound(entry_id, "invalid") from None
    return entry_id
