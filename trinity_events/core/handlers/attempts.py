"""Attempts of the current epoch that have not ended, and the turns that they take."""

from __future__ import annotations

from trinity_schemas import Producer, SaveGranted, Slot

from ..fold_state import FoldState, format_slot
from ..limits import KEPT_UNDER_WAY
from ..state import Attempt
from . import admission


def begin_attempt(
    fold: FoldState, save_id: str, slot: Slot, holder: Producer, lease: float | None
) -> Attempt:
    """Return an attempt, added if the state has none."""
    attempts = fold.state.attempts
    attempt = attempts.get(save_id)
    if attempt is None:
        attempt = attempts[save_id] = Attempt(slot=slot, holder=holder, since=fold.now, lease=lease)
        if len(attempts) > KEPT_UNDER_WAY:
            end_attempt(fold, next(iter(attempts)))
    return attempt


def end_attempt(fold: FoldState, save_id: str) -> None:
    """Remove an attempt, and pass its turn to the next group."""
    state = fold.state
    if state.attempts.pop(save_id, None) is not None and admission.limits(state):
        grant_turns(fold, admission.leave(state, save_id))


def end_previous_attempt(fold: FoldState, slot: Slot, holder: Producer) -> None:
    """End the attempts of a process, of this save's name, that still have their turn.

    Saves of one name follow each other in a process, so the end of such an attempt was lost.
    """
    attempts = fold.state.attempts
    for save_id in list(fold.state.turns):
        attempt = attempts.get(save_id)
        same = attempt is not None and attempt.slot.name == slot.name
        if same and attempt is not None and attempt.holder == holder:
            fold.add_anomaly(
                "unended-turn", f"the end of {format_slot(attempt.slot)} is not in the log"
            )
            end_attempt(fold, save_id)


def grant_turns(fold: FoldState, save_ids: list[str]) -> None:
    """Announce that these attempts may start."""
    for save_id in save_ids:
        attempt = fold.state.attempts[save_id]
        fold.announcements.append(
            SaveGranted(
                epoch=fold.state.epoch,
                save_id=save_id,
                slot=attempt.slot,
                caused_by=fold.entry_id,
                lease=attempt.lease or 0.0,
            )
        )
