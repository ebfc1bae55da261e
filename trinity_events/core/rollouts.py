"""Handlers of events about rollouts: the fates of the ordinals of the current lineage."""

from __future__ import annotations

from trinity_schemas import Envelope, LedgerRestored, RolloutsDispatched, StepTrained

from .fold_state import FoldState
from .ledger import Contradictions, Ledger, LedgerError
from .lineage import lineage_of
from .ordinal_ranges import Range, union, words_of_ranges
from .skipped_updates import ANOMALY, format_skipped_updates
from .state import MonitorState


def rollouts_dispatched(fold: FoldState, event: RolloutsDispatched, _: Envelope) -> None:
    """Open the ordinals that the trainer asked for."""
    ledger = _ledger(fold)
    if event.fingerprint is not None:
        ledger.fingerprint = event.fingerprint
    fated, skipped = ledger.note_dispatched(event.ordinals)
    if event.reissued:
        again = union((one.ordinal, one.ordinal) for one in event.reissued)
        reissued = ledger.contradictions(again)
        fated = union(fated, reissued.settled)
        _note(fold, "reissued-without-dispatch", reissued.undispatched)
    _note(fold, "dispatched-after-fate", fated)
    _note(fold, "dispatch-gap", skipped)


def step_trained(fold: FoldState, event: StepTrained, _: Envelope) -> None:
    """Settle the ordinals that a step trained, and those that were dropped before it."""
    state, ledger = fold.state, _ledger(fold)
    state.trainer_step = max(state.trainer_step, event.step)
    trained = _settle(fold, ledger, None, event.trained)
    _note(fold, "trained-twice", trained.settled, f" in step {event.step}")
    _note(fold, "fate-without-dispatch", trained.undispatched, f" in step {event.step}")
    for reason, ordinals in event.dropped.items():
        dropped = _settle(fold, ledger, reason, ordinals)
        _note(fold, "dropped-after-fate", dropped.settled, f" ({reason})")
        _note(fold, "fate-without-dispatch", dropped.undispatched, f" ({reason})")
    for sentence in format_skipped_updates(event.step, event.metrics):
        fold.note_anomaly(ANOMALY, sentence)


def ledger_restored(fold: FoldState, event: LedgerRestored, _: Envelope) -> None:
    """Take the ledger of the checkpoint that the trainer resumes from."""
    state = fold.state
    try:
        state.ledger = _restored(state, event)
    except LedgerError as error:
        fold.note_anomaly("unsound-ledger", str(error))


def _restored(state: MonitorState, event: LedgerRestored) -> Ledger:
    """Return the ledger of an event. Raises LedgerError if the run cannot go on with it."""
    ledger, resumed = event.ledger, lineage_of(state)[-1].first
    if state.ledger is not None:
        raise LedgerError("the epoch has a ledger already")
    if ledger.step != resumed:
        raise LedgerError(f"a ledger of step {ledger.step}, and the run goes on from {resumed}")
    if ledger.digest != event.digest:
        raise LedgerError("a ledger that differs from its digest")
    return Ledger.restored(ledger)


def _ledger(fold: FoldState) -> Ledger:
    """Return the ledger of the current lineage, added if the state has none."""
    state = fold.state
    if state.ledger is None:
        state.ledger = Ledger()
    return state.ledger


def _settle(
    fold: FoldState, ledger: Ledger, reason: str | None, ordinals: tuple[Range, ...]
) -> Contradictions:
    try:
        return ledger.settle(reason, ordinals)
    except LedgerError as error:
        fold.note_anomaly("ledger-full", str(error))
        return Contradictions([], [])


def _note(fold: FoldState, name: str, ordinals: list[Range], more: str = "") -> None:
    if ordinals:
        fold.note_anomaly(name, f"ordinals {words_of_ranges(ordinals)}{more}")
