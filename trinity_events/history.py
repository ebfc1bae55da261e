"""Reading a run back: its state now, and as it was at any entry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import NamedTuple

from trinity_schemas import Envelope, decode_envelope

from .core import Monitor, MonitorState
from .errors import TrinityError
from .log import ORIGIN, Entry, EventLog, Stream, position
from .reducer import fold, load_monitor

PAGE = 1000


class Folded(NamedTuple):
    """One entry, and what it made true. ``envelope`` is None when it cannot be decoded."""

    entry: Entry
    envelope: Envelope | None
    announcements: list[Envelope]


class UntilNotFound(TrinityError):
    """The log has no such entry or step to stop at."""


async def read_all(log: EventLog, stream: Stream = Stream.EVENTS) -> AsyncIterator[Entry]:
    """Every entry that is there now, oldest first."""
    end = await log.last_id(stream)
    after = ORIGIN
    while found := await log.read(after, stream=stream, through=end, limit=PAGE):
        for entry in found:
            yield entry
        after = found[-1].id


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
            if until.isdigit():
                self._until_step = int(until)
            else:
                self._until_id = _checked(until)
        self._until = until
        self.finished = until is None

    @property
    def state(self) -> MonitorState:
        """The state so far."""
        return self.monitor.state

    def feed(self, entries: Iterable[Entry]) -> list[Folded]:
        """Fold entries until there is cause to stop."""
        folded: list[Folded] = []
        for entry in entries:
            if self._until is not None and self.finished:
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
