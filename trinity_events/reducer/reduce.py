"""One run's reducer: read, fold, commit, and bring the files in step."""

from __future__ import annotations

import logging
import time

import anyio
import anyio.to_thread
import msgspec

from trinity_schemas import (
    ANNOUNCEMENT_TYPES,
    ContractError,
    Envelope,
    StepFailed,
    StepReady,
    StepSuperseded,
    decode_envelope,
    encode,
    event_tag,
)

from ..core import Monitor, MonitorState, decode_state, encode_state, plan_files
from ..core.fold import KINDS
from ..log import Commit, DeadLetter, Entry, EventLog, Stream
from .checkpoints import CheckpointFiles

logger = logging.getLogger(__name__)

SNAPSHOT_EVERY = 10_000
"""Entries between two snapshots."""
BATCH = 1000
RECONCILE_EVERY = 1.0
"""Seconds after which the files are compared with the state although nothing happened."""
_OF_AN_EPOCH = tuple(
    f"{event_tag(one)}/{kind}"
    for one in (StepReady, StepFailed, StepSuperseded)
    for kind in KINDS
    if not (one is StepReady and kind == "weights")
)
"""What stands only in its epoch; a resume may have gone back behind it."""


class Reducer:
    """Folds one run while it leads.

    Everything it holds in memory can be loaded again, so that whenever it is in doubt (a reply
    that was lost, a lead that was lost) it is thrown away and made anew.
    """

    def __init__(self, log: EventLog, files: CheckpointFiles | None, token: int) -> None:
        self._log = log
        self._files = files
        self._token = token
        self._since_snapshot = 0
        self._reconciled_at = 0.0
        self._stale = False
        self._idle = False

    async def run(self, *, until_closed: bool = False) -> bool:
        """Fold until the log refuses us, because another leads or has gone further.

        Told to, also until the run is closed and nothing more comes; returns whether it was.

        Raises the client's errors. Whichever way it ends, what was folded does not count.
        """
        monitor, self._since_snapshot = await load_monitor(self._log)
        await self._reconcile(monitor.state)
        while await self._turn(monitor):
            if until_closed and self._idle and monitor.state.closed is not None:
                return True
        return False

    async def _turn(self, monitor: Monitor) -> bool:
        """Wait for entries, for a second at most, and take one step with them."""
        after = monitor.state.position
        found = await self._log.read(after, limit=BATCH)
        if not found:
            waited = await self._log.wait(
                {Stream.EVENTS: after}, seconds=RECONCILE_EVERY, limit=BATCH
            )
            found = [entry for _, entry in waited]
        self._idle = not found
        if found and not await self._step(monitor, after, found):
            return False
        if self._stale or time.monotonic() - self._reconciled_at >= RECONCILE_EVERY:
            await self._reconcile(monitor.state)
        return True

    async def _step(self, monitor: Monitor, after: str, found: list[Entry]) -> bool:
        was_closed, epoch_before = monitor.state.closed, monitor.state.epoch
        announcements, dead = fold(monitor, found)
        self._stale = bool(announcements)
        self._since_snapshot += len(found)
        # A run that ends leaves its last state, for whoever looks at it afterwards.
        ended = monitor.state.closed is not None and was_closed is None
        due = ended or self._since_snapshot >= SNAPSHOT_EVERY
        commit = Commit(
            token=self._token,
            after=after,
            position=monitor.state.position,
            announcements=[
                (subject(one) if stands(one, monitor.state) else "", encode(one))
                for one in announcements
            ],
            retracted=_OF_AN_EPOCH if monitor.state.epoch != epoch_before else (),
            dead_letters=dead,
            snapshot=encode_state(monitor.state) if due else None,
        )
        if not await self._log.commit(commit):
            return False
        if due:
            self._since_snapshot = 0
        for one in announcements:
            logger.info("%s", one.event)
        return True

    async def _reconcile(self, state: MonitorState) -> None:
        self._reconciled_at, self._stale = time.monotonic(), False
        if self._files is not None:
            await anyio.to_thread.run_sync(self._files.reconcile, plan_files(state))


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


def subject(envelope: Envelope) -> str:
    """What an announcement is the newest of: its type and its kind."""
    event = envelope.event
    assert isinstance(event, ANNOUNCEMENT_TYPES)
    return f"{event_tag(event)}/{getattr(event, 'kind', 'weights')}"


def stands(envelope: Envelope, state: MonitorState) -> bool:
    """Whether an announcement holds now: weights until newer ones, files in their epoch."""
    of_weights = isinstance(envelope.event, StepReady) and envelope.event.kind == "weights"
    return of_weights or envelope.epoch == state.epoch


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
    monitor = Monitor(state)
    silent = 0
    while monitor.state.position != position:
        found = await log.read(monitor.state.position, through=position, limit=BATCH)
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
