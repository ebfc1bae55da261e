"""Folding a run's log: as the reducer last had it, as it is now, as it was at any entry."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

import msgspec

from trinity_schemas import ContractError, Envelope, decode_envelope

from .core import Monitor, MonitorState, decode_state
from .errors import TrinityError
from .log import ORIGIN, DeadLetter, Entry, EventLog, Stream, position

logger = logging.getLogger(__name__)

PAGE = 1000


class Folded(NamedTuple):
    """One entry, and what it made true. ``envelope`` is None when it cannot be decoded."""

    entry: Entry
    envelope: Envelope | None
    announcements: list[Envelope]


class SnapshotUnreadable(TrinityError):
    """The state of a run cannot be had from its server alone."""


class UntilNotFound(TrinityError):
    """The log has no such entry or step to stop at."""


async def read_all(
    log: EventLog, stream: Stream = Stream.EVENTS, after: str = ORIGIN
) -> AsyncIterator[Entry]:
    """Every entry after a position that is there now, oldest first."""
    end = await log.last_id(stream)
    while found := await log.read(after, stream=stream, through=end, limit=PAGE):
        for entry in found:
            yield entry
        after = found[-1].id


def fold(monitor: Monitor, found: list[Entry]) -> tuple[list[Envelope], list[DeadLetter]]:
    """Fold entries; returns what they made true, and those that could not be decoded."""
    announcements: list[Envelope] = []
    dead: list[DeadLetter] = []
    run_id = monitor.state.run_id
    for entry in found:
        try:
            envelope = decode_envelope(entry.payload)
            if envelope.run_id != run_id:
                raise ContractError(f"an event of run {envelope.run_id!r}, not of {run_id!r}")
        except ContractError as error:
            monitor.set_aside(entry.id, str(error), getattr(error, "sender", None))
            dead.append(DeadLetter(entry, str(error)))
        else:
            announcements += monitor.apply(entry.id, envelope)
    return announcements, dead


async def load_monitor(log: EventLog) -> tuple[Monitor, int]:
    """The fold as the log's position has it, and how many entries that is past a snapshot.

    Loads the last snapshot and folds on up to the position in silence: what those entries made
    true has been announced. A snapshot that this version cannot read is folded anew.
    """
    snapshot, position = await log.load()
    state = MonitorState(run_id=log.run_id)
    if snapshot is not None:
        try:
            state = decode_state(snapshot)
        except msgspec.DecodeError as error:
            logger.warning("snapshot of %s is not readable (%s): folding anew", log.run_id, error)
            if await log.first_left(Stream.EVENTS) is not None:
                raise SnapshotUnreadable(
                    f"the snapshot of run {log.run_id} is not readable ({error}) and its log is "
                    "trimmed: use the version of trinity-events that wrote it"
                ) from None
    monitor = Monitor(state)
    silent = 0
    while monitor.state.position != position:
        found = await log.read(monitor.state.position, through=position, limit=PAGE)
        if not found:
            logger.error(
                "the log of %s has no entry %s, which was folded before: what followed %s is lost",
                log.run_id,
                position,
                monitor.state.position,
            )
            monitor.state.position = position
            break
        fold(monitor, found)
        silent += len(found)
    return monitor, silent


async def current_state(log: EventLog) -> MonitorState:
    """The state after the newest entry, from the last snapshot on."""
    monitor, _ = await load_monitor(log)
    while found := await log.read(monitor.state.position, limit=PAGE):
        fold(monitor, found)
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
            envelopes, dead = fold(self.monitor, [entry])
            folded.append(
                Folded(entry, None if dead else decode_envelope(entry.payload), envelopes)
            )
            if self._until_id == entry.id or self._settles(envelopes):
                self.finished = True
        return folded

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
