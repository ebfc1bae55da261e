"""The fold: from one entry of the log to the next state, and to what became true by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trinity_schemas import (
    ConsumerDetached,
    DeadlineReached,
    Envelope,
    ExplorerStatusChanged,
    Kind,
    LeaseExpired,
    Producer,
    RunClosed,
    RunOpened,
    RunResumed,
    SaveFailed,
    SaveFinished,
    SaveProgressed,
    SaveRequested,
    SaveStarted,
    Sender,
    StepCommitted,
    StepRef,
    SyncRequested,
    ThreadCountRegistered,
    TrainerStatusChanged,
    VersionOpened,
    VersionPartPublished,
    VersionRefused,
    WeightsApplied,
    event_tag,
)

from .announcements import staged_folder
from .fold_state import describe_producer, keep_last
from .limits import (
    KEPT_LINEAGE,
    KEPT_PENDING_PROMOTIONS,
    KEPT_PRODUCERS,
    KEPT_STEPS,
    REORDERED_PRODUCERS,
)
from .state import MonitorState, ReadyPointer
from .versions import VersionFold

# Announcements are the fold's own, whichever process runs it: their producer, sequence and time
# follow from the log, so that a replay gives the very bytes that the live reducer wrote.
MONITOR = Producer(role="reducer", rank=0, node="log", incarnation="monitor")

# Consumers outlive epochs: what is said by them and of them is not fenced.
_UNFENCED_EVENTS = (
    *(WeightsApplied, VersionRefused, ExplorerStatusChanged, SyncRequested),
    ConsumerDetached,
)
_EPOCH_EVENTS = (RunOpened, RunResumed)


class Monitor(VersionFold):
    """Folds a run's log into its :class:`MonitorState`.

    Pure: the same entries give the same state and the same announcements, in the live reducer,
    in a replay and in a test. Duplicates, late attempts and events of another epoch change
    nothing and are counted as anomalies.
    """

    def apply(self, entry_id: str, envelope: Envelope) -> list[Envelope]:
        """Fold one entry; return what it made true, ready to be appended as announcements."""
        state = self.state
        # As in `_advance`; a call less for each entry is what a reducer's speed is made of.
        self._entry_id = state.position = entry_id
        state.entries += 1
        event = envelope.event
        handler = _HANDLERS.get(type(event))
        if handler is None:
            self._anomaly("announcement-among-events", event_tag(event))
            return []
        # The usual case of `_in_order`: of few senders one goes on where it was.
        who, sequence, sequences = envelope.producer.incarnation, envelope.sequence, state.sequences
        if sequences.get(who, 0) + 1 == sequence and len(sequences) < REORDERED_PRODUCERS:
            sequences[who] = sequence
        elif not self._in_order(envelope.producer, sequence):
            return []
        current = envelope.epoch == state.epoch and type(event) not in _EPOCH_EVENTS
        if (not current or not state.epoch) and not self._admit_epoch(envelope):
            return []
        handler(self, event, envelope)
        if len(state.steps) > KEPT_STEPS:
            self._forget()
        return self._flush() if self._out else []

    def set_aside(self, entry_id: str, reason: str, sender: Sender | None = None) -> None:
        """Pass over an entry that cannot be decoded; it goes to the dead letters.

        Where its sender could be read, the sender's order goes on with it.
        """
        self._advance(entry_id)
        self.state.dead_letters += 1
        self._anomaly("undecodable", reason)
        if sender is not None:
            self._in_order(sender.producer, sender.sequence)

    def _advance(self, entry_id: str) -> None:
        self._entry_id = self.state.position = entry_id
        self.state.entries += 1

    def _flush(self) -> list[Envelope]:
        state, out, now = self.state, self._out, self._now / 1000
        first = state.announced + 1
        state.announced += len(out)
        self._out = []
        return [
            Envelope(
                run_id=state.run_id,
                epoch=state.epoch,
                producer=MONITOR,
                sequence=sequence,
                occurred_at=now,
                event=event,
            )
            for sequence, event in enumerate(out, first)
        ]

    # --- who may speak ---------------------------------------------------------------------

    def _in_order(self, producer: Producer, sequence: int) -> bool:
        sequences = self.state.sequences
        last = sequences.get(producer.incarnation, 0)
        # Taken out and put back: the dictionary's order is that of last use, oldest first.
        sequences.pop(producer.incarnation, None)
        sequences[producer.incarnation] = max(last, sequence)
        keep_last(sequences, KEPT_PRODUCERS)
        if sequence <= last:
            self._anomaly(
                "duplicate", f"{describe_producer(producer)} sent its event {sequence} again"
            )
            return False
        if sequence > last + 1:
            missing = f"{last + 1}" if sequence == last + 2 else f"{last + 1} to {sequence - 1}"
            self._anomaly(
                "gap", f"of {describe_producer(producer)}, event {missing} is not in the log"
            )
        return True

    def _admit_epoch(self, envelope: Envelope) -> bool:
        if isinstance(envelope.event, _UNFENCED_EVENTS):
            return True
        if isinstance(envelope.event, _EPOCH_EVENTS) and envelope.epoch > self.state.epoch:
            return True
        name = "stale-epoch" if envelope.epoch < self.state.epoch else "unopened-epoch"
        if envelope.epoch == self.state.epoch > 0:
            name = "opened-twice"
        self._anomaly(
            name,
            f"{event_tag(envelope.event)} of epoch {envelope.epoch} from "
            f"{describe_producer(envelope.producer)}, while the run is in epoch {self.state.epoch}",
        )
        return False

    # --- the run ---------------------------------------------------------------------------

    def _run_opened(self, event: RunOpened, envelope: Envelope) -> None:
        self._open_epoch(envelope.epoch, 0, event)

    def _run_resumed(self, event: RunResumed, envelope: Envelope) -> None:
        self._open_epoch(envelope.epoch, event.step, event)
        state = self.state
        at = StepRef(state.epoch, event.step)
        kinds: tuple[Kind, ...] = ("state_dict", "checkpoint")
        for kind in kinds:
            # Weights stay where they are until the resumed trainer has published its own.
            old = state.ready.get(kind)
            if old is not None:
                state.ready[kind] = ReadyPointer(
                    at=at,
                    entry_id=self._entry_id,
                    path=old.path if old.at.step == at.step else None,
                    resumed=old.named,
                )

    def _open_epoch(self, epoch: int, step: int, opening: RunOpened | RunResumed) -> None:
        state = self.state
        for left, step_state in sorted(state.steps.items()):
            for kind in ("checkpoint", "state_dict"):
                found = step_state.kinds.get(kind)
                folder = staged_folder(step_state, kind) if found and found.outcome else None
                if folder is not None:
                    state.pending_promotions[folder] = left
                    break
            for kind, kind_state in step_state.kinds.items():
                if not kind_state.settled:
                    self._supersede(state.epoch, left, kind, StepRef(epoch, step))
        for folder in list(state.pending_promotions)[:-KEPT_PENDING_PROMOTIONS]:
            del state.pending_promotions[folder]
        state.lineage = _lineage(state, opening)
        state.epoch = epoch
        state.strategy = opening.save_strategy
        state.transport = opening.transport
        state.attempts, state.queue, state.turns = {}, {}, {}
        state.complete_checkpoints = [one for one in state.complete_checkpoints if one <= step]
        state.trainer_step = step
        state.steps = {}
        state.forgotten_through = -1
        state.closed = state.closed_error = state.closed_at = state.trainer_waits = None
        if state.opened_at is None:
            state.opened_at = self._now

    def _run_closed(self, event: RunClosed, _: Envelope) -> None:
        self.state.closed, self.state.closed_error = event.reason, event.error
        self.state.closed_at, self.state.trainer_waits = self._now, None
        self.state.trainer = "stopped"


def _lineage(state: MonitorState, opening: RunOpened | RunResumed) -> list[StepRef]:
    """Return what an epoch goes on from that follows the state's; nothing for a new beginning."""
    if isinstance(opening, RunOpened) or not state.epoch:
        return []
    last = opening.step
    before = [StepRef(one.epoch, min(one.step, last)) for one in state.lineage]
    return [*before, StepRef(state.epoch, last)][-KEPT_LINEAGE:]


_HANDLERS: dict[type, Callable[[Monitor, Any, Envelope], None]] = {
    RunOpened: Monitor._run_opened,
    RunResumed: Monitor._run_resumed,
    RunClosed: Monitor._run_closed,
    ThreadCountRegistered: Monitor._registered,
    SaveRequested: Monitor._save_requested,
    SaveStarted: Monitor._save_started,
    SaveProgressed: Monitor._save_progressed,
    SaveFinished: Monitor._save_finished,
    SaveFailed: Monitor._save_failed,
    StepCommitted: Monitor._committed,
    VersionOpened: Monitor._version_opened,
    VersionPartPublished: Monitor._part_published,
    WeightsApplied: Monitor._applied,
    VersionRefused: Monitor._refused,
    TrainerStatusChanged: Monitor._trainer_status,
    ExplorerStatusChanged: Monitor._explorer_status,
    SyncRequested: Monitor._sync_requested,
    LeaseExpired: Monitor._lease_expired,
    DeadlineReached: Monitor._deadline_reached,
    ConsumerDetached: Monitor._consumer_detached,
}
