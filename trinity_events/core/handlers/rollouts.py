"""Handlers of events about rollouts: the fates of the ordinals of the current lineage."""

from __future__ import annotations

from collections.abc import Mapping

from trinity_schemas import (
    AlarmCleared,
    AlarmRaised,
    Envelope,
    ExplorerExcluded,
    LedgerRestored,
    RolloutsDispatched,
    StepTrained,
)

from ..fold_state import FoldState, trim_oldest
from ..ledger import Contradictions, Ledger, LedgerError
from ..limits import KEPT_ALARMS, KEPT_EXCLUDED, LONGEST_REFUSAL
from ..lineage import lineage_spans
from ..ordinal_ranges import Range, format_ranges, union
from ..skipped_updates import ANOMALY, format_skipped_updates
from ..state import ExcludedExplorer, MonitorState, RaisedAlarm


def rollouts_dispatched(fold: FoldState, event: RolloutsDispatched, _: Envelope) -> None:
    """Open the ordinals that the trainer asked for, and settle those that it gave up at its end."""
    ledger = _ledger(fold)
    if event.fingerprint is not None:
        ledger.fingerprint = event.fingerprint
    fated, skipped = ledger.add_dispatched(event.ordinals)
    if event.reissued:
        again = union((reissue.ordinal, reissue.ordinal) for reissue in event.reissued)
        reissued = ledger.contradictions(again)
        fated = union(fated, reissued.settled)
        _add_anomaly(fold, "reissued-without-dispatch", reissued.undispatched)
    _add_anomaly(fold, "dispatched-after-fate", fated)
    _add_anomaly(fold, "dispatch-gap", skipped)
    _settle_dropped(fold, ledger, event.dropped)


def step_trained(fold: FoldState, event: StepTrained, _: Envelope) -> None:
    """Settle the ordinals that a step trained, and those that were dropped before it."""
    state, ledger = fold.state, _ledger(fold)
    state.trainer_step = max(state.trainer_step, event.step)
    state.learning.add(event.step, fold.now, event.metrics)
    trained = _settle(fold, ledger, None, event.trained)
    _add_anomaly(fold, "trained-twice", trained.settled, f" in step {event.step}")
    _add_anomaly(fold, "fate-without-dispatch", trained.undispatched, f" in step {event.step}")
    _settle_dropped(fold, ledger, event.dropped)
    for sentence in format_skipped_updates(event.step, event.metrics):
        fold.add_anomaly(ANOMALY, sentence)


def alarm_raised(fold: FoldState, event: AlarmRaised, _: Envelope) -> None:
    """Store an alarm until it is cleared, or until the next epoch."""
    alarms = fold.state.alarms
    alarms.pop(event.alarm, None)
    alarms[event.alarm] = RaisedAlarm(
        at=fold.now,
        entry_id=fold.entry_id,
        step=event.step,
        value=event.value,
        threshold=event.threshold,
        sentence=event.sentence[:LONGEST_REFUSAL],
    )
    trim_oldest(alarms, KEPT_ALARMS)


def alarm_cleared(fold: FoldState, event: AlarmCleared, _: Envelope) -> None:
    """Forget an alarm whose cause is gone."""
    fold.state.alarms.pop(event.alarm, None)


def explorer_excluded(fold: FoldState, event: ExplorerExcluded, _: Envelope) -> None:
    """Store the explorer, and the reason, until the next epoch."""
    excluded = fold.state.excluded
    # Inserted again: the order of the dictionary is that of the last exclusion.
    excluded.pop(event.explorer, None)
    excluded[event.explorer] = ExcludedExplorer(
        at=fold.now,
        malformed=event.malformed,
        reason=event.reason[:LONGEST_REFUSAL],
        failed=event.failed,
    )
    trim_oldest(excluded, KEPT_EXCLUDED)


def format_exclusion(explorer: str, excluded: ExplorerExcluded | ExcludedExplorer) -> str:
    """Return the exclusion of an explorer as a sentence without its full stop."""
    name = explorer if explorer.isprintable() else repr(explorer)
    cause = f"{excluded.malformed} of its answers were malformed"
    if excluded.failed:
        cause = f"{excluded.failed} of its requests in a row failed while other explorers answered"
    return (
        f"{name} is excluded until the run's next epoch, since {cause} (the last one: "
        f"{excluded.reason})"
    )


def ledger_restored(fold: FoldState, event: LedgerRestored, _: Envelope) -> None:
    """Restore the ledger of the checkpoint that the trainer resumes from."""
    state = fold.state
    try:
        state.ledger = _restore_ledger(state, event)
    # The log may say anything. A ledger that contradicts it is left out, and the fold continues.
    except LedgerError as error:
        fold.add_anomaly("unsound-ledger", str(error))


def _restore_ledger(state: MonitorState, event: LedgerRestored) -> Ledger:
    """Return the ledger of an event. Raises LedgerError if the run cannot continue with it."""
    ledger, resumed = event.ledger, lineage_spans(state)[-1].first
    if state.ledger is not None:
        raise LedgerError("second", ledger.step)
    if ledger.step != resumed:
        raise LedgerError("lineage", ledger.step, expected=resumed)
    if ledger.digest != event.digest:
        raise LedgerError("digest", ledger.step)
    return Ledger.restored(ledger)


def _ledger(fold: FoldState) -> Ledger:
    """Return the ledger of the current lineage, added if the state has none."""
    state = fold.state
    if state.ledger is None:
        state.ledger = Ledger()
    return state.ledger


def _settle_dropped(
    fold: FoldState, ledger: Ledger, dropped: Mapping[str, tuple[Range, ...]]
) -> None:
    for reason, ordinals in dropped.items():
        contradictions = _settle(fold, ledger, reason, ordinals)
        _add_anomaly(fold, "dropped-after-fate", contradictions.settled, f" ({reason})")
        _add_anomaly(fold, "fate-without-dispatch", contradictions.undispatched, f" ({reason})")


def _settle(
    fold: FoldState, ledger: Ledger, reason: str | None, ordinals: tuple[Range, ...]
) -> Contradictions:
    try:
        return ledger.settle(reason, ordinals)
    # The ledger is unchanged: its bound goes before the fates of these ordinals.
    except LedgerError as error:
        fold.add_anomaly("ledger-full", str(error))
        return Contradictions([], [])


def _add_anomaly(fold: FoldState, name: str, ordinals: list[Range], more: str = "") -> None:
    if ordinals:
        fold.add_anomaly(name, f"ordinals {format_ranges(ordinals)}{more}")
