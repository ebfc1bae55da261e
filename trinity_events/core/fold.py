"""The fold: from entries of the log to the next state, and to the announcements that follow.

1. It is pure: the same entries give the same state, and the same bytes of announcements, wherever
   batches end.
2. An event of a producer counts once, by its sequence. A duplicate and a gap are anomalies.
3. An event of another epoch changes nothing and is an anomaly. Excepted are openings of a later
   epoch, and events of consumers, which outlive epochs.
4. Every entry moves the position, also one that cannot be decoded.
5. The state is bounded, whatever the log says (:mod:`.limits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from trinity_schemas import (
    AlarmCleared,
    AlarmRaised,
    ConsumerDetached,
    ContractError,
    DeadlineReached,
    Envelope,
    EvaluationFailed,
    EvaluationFinished,
    EvaluationStarted,
    ExplorerExcluded,
    ExplorerStatusChanged,
    ForeignEvent,
    GenerationPaused,
    GenerationResumed,
    LeaseExpired,
    LedgerRestored,
    PhasesMeasured,
    Producer,
    ProfileWritten,
    ResendRequested,
    RewardErrorReported,
    RolloutsDispatched,
    RunClosed,
    RunOpened,
    RunResumed,
    SaveFailed,
    SaveFinished,
    SaveProgressed,
    SaveRequested,
    SaveStarted,
    Sender,
    StacksTaken,
    StepCommitted,
    StepTrained,
    SyncRequested,
    ThreadCountRegistered,
    TrainerStatusChanged,
    VersionOpened,
    VersionPartPublished,
    VersionRefused,
    WaitEnded,
    WaitStarted,
    WeightsApplied,
    decode_envelope,
    event_tag,
)

from . import reward_errors
from .compaction import drop_oldest_steps
from .fold_state import FoldState, format_producer, trim_oldest
from .handlers import evaluations, rollouts, runs, saves, waits, weights
from .limits import KEPT_PRODUCERS, KEPT_STEPS, MOST_EPOCHS_AT_ONCE, REORDERED_PRODUCERS
from .state import MonitorState

Decode = Callable[[bytes], Envelope]
"""Decoder of entries: of an :class:`EnvelopeReader` for many, or :func:`decode_envelope`."""

E = TypeVar("E", bound=tuple[str, bytes])

MONITOR = Producer(role="reducer", rank=0, node="log", incarnation="monitor")
"""Producer of every announcement, whichever process folds.

Sequence and time follow from the log, so that a replay gives the bytes that the reducer wrote.
"""

# Consumers outlive epochs: their events, and events about them, are not fenced.
_UNFENCED_EVENTS = (
    WeightsApplied,
    VersionRefused,
    GenerationPaused,
    GenerationResumed,
    ExplorerStatusChanged,
    SyncRequested,
    ResendRequested,
    RewardErrorReported,
    ConsumerDetached,
    PhasesMeasured,
)
_EPOCH_EVENTS = (RunOpened, RunResumed)
_WAIT_EVENTS = (WaitStarted, WaitEnded)

_HANDLERS: dict[type, Callable[[FoldState, Any, Envelope], None]] = {
    RunOpened: runs.run_opened,
    RunResumed: runs.run_resumed,
    RunClosed: runs.run_closed,
    TrainerStatusChanged: runs.trainer_status_changed,
    ConsumerDetached: runs.consumer_detached,
    ProfileWritten: runs.profile_written,
    ThreadCountRegistered: saves.thread_count_registered,
    SaveRequested: saves.save_requested,
    SaveStarted: saves.save_started,
    SaveProgressed: saves.save_progressed,
    SaveFinished: saves.save_finished,
    SaveFailed: saves.save_failed,
    StepCommitted: saves.step_committed,
    LeaseExpired: saves.lease_expired,
    DeadlineReached: saves.deadline_reached,
    VersionOpened: weights.version_opened,
    VersionPartPublished: weights.part_published,
    WeightsApplied: weights.weights_applied,
    GenerationPaused: weights.generation_paused,
    GenerationResumed: weights.generation_resumed,
    VersionRefused: weights.version_refused,
    ExplorerStatusChanged: weights.explorer_status_changed,
    SyncRequested: weights.sync_requested,
    ResendRequested: weights.resend_requested,
    RolloutsDispatched: rollouts.rollouts_dispatched,
    StepTrained: rollouts.step_trained,
    ExplorerExcluded: rollouts.explorer_excluded,
    RewardErrorReported: reward_errors.reward_error_reported,
    AlarmRaised: rollouts.alarm_raised,
    AlarmCleared: rollouts.alarm_cleared,
    LedgerRestored: rollouts.ledger_restored,
    EvaluationStarted: evaluations.evaluation_started,
    EvaluationFinished: evaluations.evaluation_finished,
    EvaluationFailed: evaluations.evaluation_failed,
    WaitStarted: waits.wait_started,
    WaitEnded: waits.wait_ended,
    StacksTaken: waits.stacks_taken,
    PhasesMeasured: runs.phases_measured,
}


class Monitor:
    """Fold of a run's log into its :class:`MonitorState`, in the live reducer and in a replay."""

    def __init__(self, state: MonitorState) -> None:
        self.state = state
        self._fold = FoldState(state)

    def apply(self, entry_id: str, envelope: Envelope) -> list[Envelope]:
        """Fold one entry; return the announcements that follow from it, ready to be appended."""
        fold, state = self._fold, self.state
        # The body of `_advance`: a call less for each entry (`benchmarks fold`).
        fold.entry_id = state.position = entry_id
        # Before anything is refused: every entry moves the position (4).
        state.entries += 1
        event = envelope.event
        handler = _HANDLERS.get(type(event))
        if handler is None:
            fold.add_anomaly("announcement-among-events", event_tag(event))
            return []
        # The usual case of `_in_order`: one of few producers sends its next event.
        name, sequence = envelope.producer.incarnation, envelope.sequence
        sequences = state.sequences
        if sequences.get(name, 0) + 1 == sequence and len(sequences) < REORDERED_PRODUCERS:
            sequences[name] = sequence
        elif not _in_order(fold, envelope.producer, sequence):
            return []
        current = envelope.epoch == state.epoch and type(event) not in _EPOCH_EVENTS
        # Epoch 0 is none: before the first opening, events of an epoch change nothing.
        if (not current or not state.epoch) and not _admit_epoch(fold, envelope):
            return []
        handler(fold, event, envelope)
        if envelope.host_id is not None:
            runs.record_host(state, envelope)
        # After each entry, not after a batch: what is dropped follows from the log alone (1, 5).
        if len(state.steps) > KEPT_STEPS:
            drop_oldest_steps(state)
        return _pop_announcements(fold) if fold.announcements else []

    def fold(
        self, entries: Iterable[E], decode: Decode = decode_envelope
    ) -> tuple[list[Envelope], list[tuple[E, str]]]:
        """Fold entries, each an id and a payload.

        Returns their announcements, and the entries that cannot be decoded, with the reasons.
        """
        announcements: list[Envelope] = []
        undecodable: list[tuple[E, str]] = []
        # Bind names once: this loop decides the speed of the reducer (`benchmarks fold`).
        apply, run_id = self.apply, self.state.run_id
        for entry in entries:
            entry_id, payload = entry
            try:
                envelope = decode(payload)
                if envelope.run_id != run_id:
                    raise ForeignEvent(envelope.run_id, run_id)
            except ContractError as error:
                self.set_aside(entry_id, error)
                undecodable.append((entry, str(error)))
                continue
            if new_announcements := apply(entry_id, envelope):
                announcements += new_announcements
        return announcements, undecodable

    def set_aside(self, entry_id: str, error: ContractError) -> None:
        """Pass over an entry that cannot be decoded, and count it as a dead letter.

        The sender's sequence advances, if the sender could be decoded.
        """
        fold = self._fold
        _advance(fold, entry_id)
        fold.state.dead_letters += 1
        fold.add_anomaly("undecodable", str(error))
        sender: Sender | None = getattr(error, "sender", None)
        # Else the sender's next event would count as a gap.
        if sender is not None:
            _in_order(fold, sender.producer, sender.sequence)


def decode_entry(run_id: str, payload: bytes, decode: Decode = decode_envelope) -> Envelope:
    """Decode the envelope of an entry. Raises ContractError, even for an event of another run."""
    envelope = decode(payload)
    if envelope.run_id != run_id:
        raise ForeignEvent(envelope.run_id, run_id)
    return envelope


def _advance(fold: FoldState, entry_id: str) -> None:
    fold.entry_id = fold.state.position = entry_id
    fold.state.entries += 1


def _in_order(fold: FoldState, producer: Producer, sequence: int) -> bool:
    """Record a producer's sequence; return False if the log has had this event before."""
    sequences = fold.state.sequences
    last = sequences.get(producer.incarnation, 0)
    # Removed and inserted again: the dictionary's order is that of last use, oldest first.
    sequences.pop(producer.incarnation, None)
    # The larger one: after an old duplicate, later events must not count a second time.
    sequences[producer.incarnation] = max(last, sequence)
    trim_oldest(sequences, KEPT_PRODUCERS)
    if sequence <= last:
        fold.add_anomaly(
            "duplicate", f"{format_producer(producer)} sent its event {sequence} again"
        )
        return False
    if sequence > last + 1:
        missing = f"{last + 1}" if sequence == last + 2 else f"{last + 1} to {sequence - 1}"
        fold.add_anomaly(
            "gap", f"of {format_producer(producer)}, event {missing} is not in the log"
        )
    return True


def _admit_epoch(fold: FoldState, envelope: Envelope) -> bool:
    """Return True if an event of the envelope's epoch may change the state."""
    epoch = fold.state.epoch
    if isinstance(envelope.event, _UNFENCED_EVENTS):
        return True
    # Explorers outlive epochs; the waits of all other processes end with theirs.
    if isinstance(envelope.event, _WAIT_EVENTS) and envelope.producer.role == "explorer":
        return True
    opens = isinstance(envelope.event, _EPOCH_EVENTS)
    if opens and epoch < envelope.epoch <= epoch + MOST_EPOCHS_AT_ONCE:
        return True
    name = "stale-epoch" if envelope.epoch < epoch else "unopened-epoch"
    if opens and envelope.epoch > epoch:
        name = "epoch-jump"
    elif envelope.epoch == epoch > 0:
        name = "opened-twice"
    fold.add_anomaly(
        name,
        f"{event_tag(envelope.event)} of epoch {envelope.epoch} from "
        f"{format_producer(envelope.producer)}, while the run is in epoch {epoch}",
    )
    return False


def _pop_announcements(fold: FoldState) -> list[Envelope]:
    """Return the announcements of the entry in envelopes, numbered and stamped by the log."""
    # The time of the entry, not of the fold: a replay gives the same bytes (decision 4).
    state, events, now = fold.state, fold.announcements, fold.now / 1000
    first = state.announced + 1
    state.announced += len(events)
    fold.announcements = []
    return [
        Envelope(
            run_id=state.run_id,
            epoch=state.epoch,
            producer=MONITOR,
            sequence=sequence,
            occurred_at=now,
            event=event,
        )
        for sequence, event in enumerate(events, first)
    ]
