"""State of a run after any of its entries, at the cost of a short fold."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Protocol

import anyio.lowlevel

from trinity_schemas import ContractError, EnvelopeReader, decode_envelope

from ..core import Monitor, MonitorState
from ..core.kept_states import KeptState, StateSpacing
from ..log import ORIGIN, Entry, RedisEventLog, Stream, before, position
from ..log.page_size import TURN
from ..replay import Folded, checked_entry, fold_one, is_about, until_not_reached
from .export import whole_stream
from .format import Header, events_from, read_lines
from .kept_states import KeptStates
from .ownership import identity_of, log_identity
from .segments import Archive

_LAST = (2**64, 0)
"""Position after every entry."""


class StateSource(Protocol):
    """Log whose events can be read from any entry on."""

    run_id: str
    kept_states: KeptStates
    """Kept states of the log."""

    async def identity(self) -> str:
        """Return what only copies of this log share."""
        ...

    def events(self, since: str | None = None) -> AsyncGenerator[Entry, None]:
        """Yield the events from an entry on, itself included; all by default."""
        ...

    def announcements(self) -> AsyncGenerator[Entry, None]:
        """Yield all announcements."""
        ...


class RunSource:
    """Log of a run on a server, with its archive.

    Args:
        log: The log on the server.
        root: Folder with the checkpoint directory of each run.
        spacing: Places of its kept states.
    """

    def __init__(
        self, log: RedisEventLog, root: Path, spacing: StateSpacing = StateSpacing()
    ) -> None:
        self.run_id = log.run_id
        self.kept_states = KeptStates.for_run(root / log.run_id, spacing)
        self._log = log
        self._archive = Archive(root / log.run_id, log.run_id)

    async def identity(self) -> str:
        """Return the id and the digest of the log's first entry."""
        return str(await log_identity(self._log, self._archive))

    def events(self, since: str | None = None) -> AsyncGenerator[Entry, None]:
        """Yield the events from an entry on, of the archive and then of the server."""
        after = ORIGIN if since is None else before(since)
        return whole_stream(self._log, Stream.EVENTS, self._archive, after)

    def announcements(self) -> AsyncGenerator[Entry, None]:
        """Yield all announcements, of the archive and then of the server."""
        return whole_stream(self._log, Stream.ANNOUNCEMENTS, self._archive)


class FileSource:
    """Log in a file that ``export`` wrote. Raises BadRecording."""

    def __init__(self, path: Path, spacing: StateSpacing = StateSpacing()) -> None:
        self.header: Header = read_lines(path)[0]
        self.run_id = self.header.run_id
        self._path = path
        self._digest = self.header.digest or _digest_of_older(path)
        self.kept_states = KeptStates.for_file(self.run_id, self._digest, spacing)

    async def identity(self) -> str:
        """Return the digest of the file."""
        return self._digest

    async def events(self, since: str | None = None) -> AsyncGenerator[Entry, None]:
        """Yield the events from an entry on."""
        if since is not None:
            for entry in events_from(self._path, since):
                yield entry
            return
        async for entry in self._all(Stream.EVENTS):
            yield entry

    def announcements(self) -> AsyncGenerator[Entry, None]:
        """Yield all announcements."""
        return self._all(Stream.ANNOUNCEMENTS)

    async def _all(self, stream: Stream) -> AsyncGenerator[Entry, None]:
        for number, line in enumerate(read_lines(self._path)[1]):
            if number % TURN == 0:
                await anyio.lowlevel.checkpoint()
            if line.stream == stream.value:
                yield line.entry


def _digest_of_older(path: Path) -> str:
    """Return a digest for a file of an older version, whose header has none."""
    status = path.stat()
    return hashlib.sha256(
        f"{path.resolve()} {status.st_size} {status.st_mtime_ns}".encode()
    ).hexdigest()


class StateAt:
    """States of a run after any of its entries.

    It folds from the last kept state before the entry, and keeps the states that it passes. The
    first use of a log therefore folds it up to the entry; each later one folds at most
    the entries between two kept states, by the source's ``StateSpacing``. A kept state of another
    log or version is not used, and the log is folded again. Example::

        states = StateAt(RunSource(log, root))
        state = await states.at("1760000000250-0")

    Args:
        source: The log; :class:`RunSource` or :class:`FileSource`.
    """

    def __init__(self, source: StateSource) -> None:
        self.source = source
        self._decode = EnvelopeReader().decode

    async def at(self, entry_id: str | None = None) -> MonitorState:
        """Return the state after the last entry up to an id; by default after the newest entry."""
        return await self._folded_to(_LAST if entry_id is None else position(entry_id), None)

    async def at_number(self, number: int) -> MonitorState:
        """Return the state after so many entries; after the newest if the log has fewer."""
        return await self._folded_to(_LAST, number)

    async def after_step(self, step: int) -> str:
        """Return the entry that the first announcement of a step follows from.

        A log that no reducer folded has no announcements: it is folded. Raises UntilNotFound if
        nothing of the step was announced.
        """
        async with aclosing(self.source.announcements()) as announcements:
            async for entry in announcements:
                with suppress(ContractError):
                    event = decode_envelope(entry.payload).event
                    if is_about(event, step):
                        return str(getattr(event, "caused_by", entry.id))
        async with aclosing(self.folded()) as entries:
            async for _, folded in entries:
                if any(is_about(announcement.event, step) for announcement in folded.announcements):
                    return folded.entry.id
        raise until_not_reached("step", str(step), await self.at())

    async def entry_of(self, place: str) -> str:
        """Return the entry that a text names: an entry id, or a step by its first announcement.

        Raises UntilNotFound if the log ends before it.
        """
        if place.isascii() and place.isdigit():
            return await self.after_step(int(place))
        checked_entry(place)
        end = await self.at()
        if position(place) > position(end.position):
            raise until_not_reached("entry", place, end)
        return place

    async def first_after(self, holds: Callable[[MonitorState], bool]) -> Folded | None:
        """Return the first entry after which a condition holds; None if it never does.

        It asks at each kept state and at the end, then at each entry before the first one that
        holds. Between two kept states it misses what holds for a while only.
        """
        end, low = (await self.at()).entries, 0
        # At the places of kept states, where asking costs a short fold at most.
        apart = self.source.kept_states.spacing.interval(end)
        for high in [*range(apart, end, apart), end]:
            if holds(await self.at_number(high)):
                break
            low = high
        else:
            return None
        return await self.first_of_all(holds, (await self.at_number(low)).position)

    async def first_of_all(
        self, holds: Callable[[MonitorState], bool], after: str = ORIGIN
    ) -> Folded | None:
        """Return the first entry after a position after which a condition holds.

        It asks at every entry. Returns None if the condition never holds.
        """
        async with aclosing(self.folded(after)) as entries:
            async for state, folded in entries:
                if holds(state):
                    return folded
        return None

    async def folded(
        self, after: str = ORIGIN
    ) -> AsyncGenerator[tuple[MonitorState, Folded], None]:
        """Yield each entry after a position, with the state that it gave.

        The state goes on with the next entry: copy what must stay.
        """
        state = await self.at(after)
        monitor = Monitor(state)
        async with aclosing(self._events_after(state)) as events:
            async for entry in events:
                yield state, fold_one(monitor, entry, self._decode)

    async def _folded_to(self, until: tuple[int, int], number: int | None) -> MonitorState:
        """Fold the entries up to a position and up to a number, from the last kept state on."""
        log = await self.source.identity()
        state = await self._kept_before(log, until, number)
        monitor, page = Monitor(state), list[Entry]()
        spacing = self.source.kept_states.spacing
        async with aclosing(self._events_after(state)) as events:
            async for entry in events:
                reached = state.entries + len(page)
                if position(entry.id) > until or (number is not None and reached >= number):
                    break
                page.append(entry)
                due = (reached + 1) % spacing.interval(reached + 1) == 0
                # Other tasks run between two pages (`log/page_size.py`), and a kept state needs an
                # exact end.
                if due or len(page) == TURN:
                    monitor.fold(page, self._decode)
                    page.clear()
                    await anyio.lowlevel.checkpoint()
                if due:
                    self.source.kept_states.save(
                        KeptState(log=log, entry=identity_of(entry), state=state)
                    )
        monitor.fold(page, self._decode)
        return state

    async def _kept_before(
        self, log: str, until: tuple[int, int], number: int | None
    ) -> MonitorState:
        """Return the last kept state before an entry, if it is of this log; else an empty one."""
        kept_state = self.source.kept_states.before(until, number)
        if kept_state is None:
            return MonitorState(run_id=self.source.run_id)
        async with aclosing(self.source.events(kept_state.state.position)) as events:
            entry = await anext(events, None)
        # Logs of one run may share ids: the digests in the identities tell them apart.
        if kept_state.log == log and entry is not None and kept_state.entry == identity_of(entry):
            return kept_state.state
        # Left alone, the states of the other log would be found first each time.
        self.source.kept_states.clear()
        return MonitorState(run_id=self.source.run_id)

    async def _events_after(self, state: MonitorState) -> AsyncGenerator[Entry, None]:
        """Yield the events after a state."""
        begin = state.position
        async with aclosing(self.source.events(None if begin == ORIGIN else begin)) as events:
            async for entry in events:
                if entry.id != begin:
                    yield entry
