"""Folding a run's log: as the reducer last had it, as it is now, as it was at any entry."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import msgspec
from msgspec import Struct

from trinity_schemas import ContractError, Envelope, EnvelopeReader, decode_envelope

from .core import Monitor, MonitorState, decode_state
from .errors import TrinityError
from .log import ORIGIN, DeadLetter, Entry, EventLog, PageSize, Stream, SyncEventLog, position
from .log.page_size import TURN, in_turns

logger = logging.getLogger(__name__)

PAGE = 1000
"""Events that are read at once, at most."""

Decode = Callable[[bytes], Envelope]
"""That of an :class:`EnvelopeReader`, where many entries are read; or :func:`decode_envelope`."""


class Folded(NamedTuple):
    """One entry, and what it made true. ``envelope`` is None when it cannot be decoded."""

    entry: Entry
    envelope: Envelope | None
    announcements: list[Envelope]


class SnapshotUnreadable(TrinityError):
    """The state of a run cannot be had from its server alone."""


class UntilNotFound(TrinityError):
    """The log has no such entry or step to stop at."""


def page_of(stream: Stream) -> int:
    """Entries of a stream that are read at once, at most.

    An announcement lists what it rests on: that of 2,048 ranks takes as much as a page of events.
    """
    return PAGE if stream is Stream.EVENTS else max(1, PAGE // 20)


async def read_all(
    log: EventLog, stream: Stream = Stream.EVENTS, after: str = ORIGIN
) -> AsyncIterator[Entry]:
    """Every entry after a position that is there now, oldest first."""
    end, page = await log.last_id(stream), PageSize(page_of(stream))
    while found := await log.read(after, stream=stream, through=end, limit=page.limit):
        page.learn(found)
        for entry in found:
            yield entry
        after = found[-1].id


def announced(log: SyncEventLog, after: str = ORIGIN) -> Iterator[Entry]:
    """Every announcement after a position, oldest first, as far as they have come."""
    stream = Stream.ANNOUNCEMENTS
    page = PageSize(page_of(stream))
    while True:
        asked = page.limit
        found = log.read(after, stream=stream, limit=asked)
        page.learn(found)
        yield from found
        if len(found) < asked:
            return  # not once a page is empty: of a busy run, over a slow network, none is
        after = found[-1].id


def envelope_of(run_id: str, payload: bytes, decode: Decode = decode_envelope) -> Envelope:
    """The envelope of an entry of the run. Raises ContractError, also when it is another run's."""
    envelope = decode(payload)
    if envelope.run_id != run_id:
        raise _of_another(envelope.run_id, run_id)
    return envelope


def _of_another(found: str, run_id: str) -> ContractError:
    return ContractError(f"an event of run {found!r}, not of {run_id!r}")


def set_aside(monitor: Monitor, entry: Entry, error: ContractError) -> DeadLetter:
    """Pass over an entry that could not be decoded; returns the dead letter that it becomes."""
    monitor.set_aside(entry.id, str(error), getattr(error, "sender", None))
    return DeadLetter(entry, str(error))


def fold(
    monitor: Monitor, found: Sequence[Entry], decode: Decode = decode_envelope
) -> tuple[list[Envelope], list[DeadLetter]]:
    """Fold entries; returns what they made true, and those that could not be decoded."""
    announcements: list[Envelope] = []
    dead: list[DeadLetter] = []
    # Bound once: this loop is what a reducer's speed is made of.
    apply, run_id = monitor.apply, monitor.state.run_id
    for entry_id, payload in found:
        try:
            envelope = decode(payload)
            if envelope.run_id != run_id:
                raise _of_another(envelope.run_id, run_id)
        except ContractError as error:
            dead.append(set_aside(monitor, Entry(entry_id, payload), error))
            continue
        if true_now := apply(entry_id, envelope):
            announcements += true_now
    return announcements, dead


class Work(Struct):
    """What was folded, and what that took: a new leader repeats all since the last snapshot."""

    entries: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Loaded(NamedTuple):
    """The fold as a reducer left it."""

    monitor: Monitor
    position: str
    """What the server has as the reducer's position; the log may have ended before it."""
    began: str
    """Where folding began: the position of the snapshot, or the end of the archive."""
    silent: Work
    """What was folded past that."""


Archived = Callable[[str], Iterator[Entry]]
"""The events that are kept in files after a position."""


async def load_monitor(log: EventLog, archived: Archived | None = None) -> Loaded:
    """The fold as the log's position has it.

    Loads the last snapshot and folds on up to the position in silence: what those entries made
    true has been announced. A snapshot that this version cannot read is folded anew, from the
    files where the log is trimmed. A log that ends before the position goes on from its end.
    """
    snapshot, reached = await log.load()
    through = await _reachable(log, reached)
    monitor = Monitor(await _load_state(log, snapshot, through, archived))
    state, silent, decode = monitor.state, Work(), EnvelopeReader().decode
    page = PageSize(PAGE)
    began = min(state.position, through, key=position)
    while position(state.position) < position(through):
        found = await log.read(state.position, through=through, limit=page.limit)
        nbytes = page.learn(found)
        if not found:
            logger.error(
                "the log of %s has no entry %s, which was folded before: what followed %s is lost",
                log.run_id,
                through,
                state.position,
            )
            break
        began_at = anyio.current_time()
        for some in in_turns(found, nbytes):
            fold(monitor, some, decode)
            await anyio.lowlevel.checkpoint()
        silent.seconds += anyio.current_time() - began_at
        silent.entries += len(found)
        silent.bytes += nbytes
    # Also where the snapshot has gone further: ids that come are above the log's end alone.
    state.position = through
    return Loaded(monitor, reached, began, silent)


async def _reachable(log: EventLog, reached: str) -> str:
    """How far the log goes, of what was folded before."""
    end = await log.last_id()
    if position(end) >= position(reached):
        return reached
    logger.error(
        "the log of %s ends at %s and has no entry %s, which was folded before: the server failed "
        "over or lost its data, and what came between is lost; the run goes on from there",
        log.run_id,
        end,
        reached,
    )
    return end


async def _load_state(
    log: EventLog, snapshot: bytes | None, reached: str, archived: Archived | None
) -> MonitorState:
    state, why = MonitorState(run_id=log.run_id), "there is no snapshot"
    left = await log.first_retained_id(Stream.EVENTS)

    def goes_on(state: MonitorState) -> bool:
        """Whether what is left of the log has all that comes after a state."""
        if left is None:
            return True
        return position(state.position) >= min(position(left), position(reached)) > position(ORIGIN)

    if snapshot is not None:
        try:
            decoded = decode_state(snapshot)
            if goes_on(decoded):
                return decoded
            why = f"the snapshot is of {decoded.position}"
        except msgspec.DecodeError as error:
            why = f"the snapshot is not readable ({error})"
        logger.warning("of run %s %s: folding anew", log.run_id, why)
    if left is None:
        return state
    if archived is not None:
        # In a thread: the lead is to be kept meanwhile.
        state = await anyio.to_thread.run_sync(_refold, archived, log.run_id, reached)
    if goes_on(state):
        return state
    if snapshot is None and state.position == ORIGIN:
        logger.error(
            "of run %s %s, and its log begins at %s: what came before is lost, and the run "
            "goes on with what is left",
            log.run_id,
            why,
            left,
        )
        return state
    have = (
        "no archive of it is at hand"
        if archived is None
        else (f"its archive ends at {state.position}")
    )
    raise SnapshotUnreadable(
        f"of run {log.run_id} {why}, its log is trimmed up to {left} and {have}: put the missing "
        "segments back into the log folder of the run's checkpoint directory, or use the version "
        "of trinity-events that wrote the snapshot"
    )


def _refold(archived: Archived, run_id: str, reached: str) -> MonitorState:
    monitor, decode = Monitor(MonitorState(run_id=run_id)), EnvelopeReader().decode
    for number, entry in enumerate(archived(ORIGIN)):
        if position(entry.id) > position(reached):
            break
        fold(monitor, [entry], decode)
        if number % TURN == 0:
            anyio.from_thread.check_cancelled()
    return monitor.state


async def current_state(log: EventLog, archived: Archived | None = None) -> MonitorState:
    """Return the state after the newest entry, from the last snapshot on, or from the archive."""
    monitor = (await load_monitor(log, archived)).monitor
    # What comes meanwhile is not waited for: of a busy run, over a slow network, that has no end.
    async for entry in read_all(log, after=monitor.state.position):
        fold(monitor, [entry])
    return monitor.state


class Replay:
    """Folds a log from its beginning, entry by entry, to an entry or a step.

    Args:
        run_id: The run whose log it is.
        until: An entry id (that entry is the last), or a step (its first announcement is made by
            the last entry); None goes to the end.
    """

    def __init__(self, run_id: str, until: str | None = None) -> None:
        self.monitor = Monitor(MonitorState(run_id=run_id))
        self._decode = EnvelopeReader().decode
        self._until_id = self._until_step = None
        if until is not None:
            if until.isascii() and until.isdigit():
                self._until_step = int(until)
            else:
                self._until_id = _checked(until)
        self._until = until
        self.finished = until is None

    @property
    def wants_more(self) -> bool:
        """Whether the place to stop at is still to come."""
        return self._until is None or not self.finished

    @property
    def state(self) -> MonitorState:
        """The state so far."""
        return self.monitor.state

    def feed(self, entries: Iterable[Entry]) -> list[Folded]:
        """Fold entries until there is cause to stop."""
        folded: list[Folded] = []
        for entry in entries:
            if not self.wants_more:
                break
            if self._until_id is not None and position(entry.id) > position(self._until_id):
                self.finished = True
                break
            one = self._fold(entry)
            folded.append(one)
            if self._until_id == entry.id or self._settles(one.announcements):
                self.finished = True
        return folded

    def _fold(self, entry: Entry) -> Folded:
        """Fold one entry, and keep its envelope for whoever shows it."""
        try:
            envelope = envelope_of(self.state.run_id, entry.payload, self._decode)
        except ContractError as error:
            set_aside(self.monitor, entry, error)
            return Folded(entry, None, [])
        return Folded(entry, envelope, self.monitor.apply(entry.id, envelope))

    def _settles(self, announcements: list[Envelope]) -> bool:
        return self._until_step is not None and any(
            getattr(one.event, "kind", None) is not None
            and getattr(one.event, "step", None) == self._until_step
            for one in announcements
        )

    def check_finished(self) -> None:
        """Raise UntilNotFound when the log ended before the place to stop at came."""
        if not self.finished and not (
            self._until_id is not None and position(self.state.position) >= position(self._until_id)
        ):
            what = f"step {self._until}" if self._until_step is not None else f"entry {self._until}"
            raise UntilNotFound(
                f"{what} was not reached: the log of run {self.state.run_id} ends at "
                f"{self.state.position}, with step {self.state.trainer_step}"
            )


def _checked(entry_id: str) -> str:
    try:
        position(entry_id)
    except ValueError as error:
        raise UntilNotFound(
            f"--until takes a step, such as 40, or an entry id as tail prints them: {error}"
        ) from None
    return entry_id
