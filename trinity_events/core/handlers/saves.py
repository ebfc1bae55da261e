"""Handlers of events about saves: registrations, attempts and their turns, commits, timeouts."""

from __future__ import annotations

from msgspec import structs

from trinity_schemas import (
    DeadlineReached,
    Envelope,
    LeaseExpired,
    Producer,
    Registration,
    SaveFailed,
    SaveFinished,
    SaveGranted,
    SaveProgressed,
    SaveProof,
    SaveRequested,
    SaveStarted,
    Slot,
    StepCommitted,
    ThreadCountRegistered,
)

from ...checkpoints.layout import parse_staged_folder
from ..announcements import announce_complete, announce_failure
from ..completeness import format_missing
from ..fold_state import FoldState, format_producer, format_slot, trim_oldest
from ..limits import KEPT_ATTEMPTS, KEPT_UNDER_WAY, LONGEST_REASON
from ..state import Attempt, KindState, SlotState
from . import admission
from .waits import forget_waits


def thread_count_registered(fold: FoldState, event: ThreadCountRegistered, _: Envelope) -> None:
    """Add a registration to a kind of a step."""
    if _register(fold, event.step, event.registration):
        announce_complete(fold, event.step, event.registration.kind)


def _register(fold: FoldState, step: int, registration: Registration) -> bool:
    """Return True if the registration was added."""
    kind = fold.ensure_kind(step, registration.kind)
    if kind is None or kind.compacted:
        return False
    kind.registrations[registration.registration_id] = registration
    return True


def save_requested(fold: FoldState, event: SaveRequested, envelope: Envelope) -> None:
    """Queue an attempt for its turn."""
    state = fold.state
    if event.save_id in state.attempts:
        if event.save_id not in state.turns:
            _end_previous_attempt(fold, event.slot, envelope.producer)
        return
    slot = fold.ensure_slot(event.slot, event.ranks)
    if slot is not None and slot.proof is None:
        slot.failed.pop(event.save_id, None)
        slot.waiting[event.save_id] = fold.now
        trim_oldest(slot.waiting, KEPT_ATTEMPTS)
    if event.process is None and not admission.is_limited(state):
        return  # Recorded before turns were granted.
    # A finished or dropped slot gets a turn too: its worker waits for an answer.
    _end_previous_attempt(fold, event.slot, envelope.producer)
    _begin_attempt(fold, event.save_id, event.slot, envelope.producer, event.lease)
    group = admission.get_group(state, event, envelope.producer)
    _grant_turns(fold, admission.request_turn(state, event.save_id, group))


def save_started(fold: FoldState, event: SaveStarted, envelope: Envelope) -> None:
    """Record that an attempt runs."""
    if event.slot.kind == "weights":
        _part_started(fold, event, envelope)
        return
    slot = fold.ensure_slot(event.slot, event.ranks)
    if slot is None or event.save_id in slot.failed or _is_saved(slot, event.path):
        if event.save_id not in fold.state.attempts:
            return  # It ended before: the event is late, or its worker was taken for dead.
    else:
        slot.waiting.pop(event.save_id, None)
        slot.running[event.save_id] = fold.now
        if len(slot.running) > KEPT_ATTEMPTS:
            _remove_attempt(slot, next(iter(slot.running)))
    if admission.is_limited(fold.state) and event.save_id not in fold.state.turns:
        producer = format_producer(envelope.producer)
        fold.add_anomaly(
            "out-of-turn", f"{producer} began {format_slot(event.slot)} without a turn"
        )
    attempt = _begin_attempt(fold, event.save_id, event.slot, envelope.producer, event.lease)
    attempt.started = True
    attempt.since = fold.now


def _part_started(fold: FoldState, event: SaveStarted, envelope: Envelope) -> None:
    """Record that a rank publishes its part, so that its lease is watched; it needs no turn."""
    kind = fold.ensure_kind(event.slot.step, "weights")
    if kind is not None and kind.outcome is None:
        attempt = _begin_attempt(fold, event.save_id, event.slot, envelope.producer, event.lease)
        attempt.started = True


def save_progressed(fold: FoldState, event: SaveProgressed, _: Envelope) -> None:
    """Record how many bytes a running attempt has written."""
    slot = fold.find_slot(event.slot)
    if slot is not None and event.save_id in slot.running:
        slot.progress[event.save_id] = event.bytes


def save_finished(fold: FoldState, event: SaveFinished, _: Envelope) -> None:
    """Store the proof of a finished attempt, and announce its step if that completes it."""
    # First: the turn passes on even if the step was dropped.
    end_attempt(fold, event.save_id)
    slot = fold.ensure_slot(event.slot, event.ranks)
    if slot is None:
        return
    _remove_attempt(slot, event.save_id)
    # It may have been taken for dead: what finishes after its lease still counts (decision 10).
    slot.failed.pop(event.save_id, None)
    kind = fold.state.steps[event.slot.step].kinds[event.slot.kind]
    proof = SaveProof(
        slot=event.slot, save_id=event.save_id, bytes=event.bytes, digest=event.digest
    )
    if slot.proof is None:
        kind.finished += 1
        slot.proof, slot.path = proof, event.path
    elif not _finished_again(fold, slot, kind, proof, event.path):
        return
    announce_complete(fold, event.slot.step, event.slot.kind)


def _finished_again(
    fold: FoldState, slot: SlotState, kind: KindState, proof: SaveProof, path: str | None
) -> bool:
    """Store another finished attempt at a slot, if it is in another folder and may be needed."""
    before = slot.proof
    if before is None or before.save_id == proof.save_id:
        return False
    folder, newest = parse_staged_folder(path) or "", slot.folder
    if path is not None and path == slot.path and proof.bytes != slot.nbytes:
        slot.rewritten = proof.bytes
    if folder in (newest, *slot.others):
        needed = False
    elif kind.outcome is None:
        # The newest attempt leads: `find_completion` tries its folder first.
        slot.others[newest] = before
        slot.proof, slot.path, slot.rewritten = proof, path, None
        needed = True
    else:
        needed = _awaits_checkpoint(fold, proof.slot)
        if needed:
            slot.others[folder] = proof
    trim_oldest(slot.others, KEPT_ATTEMPTS)
    if not needed:
        fold.add_anomaly("late-attempt", f"{format_slot(proof.slot)} was finished before")
    return needed


def _awaits_checkpoint(fold: FoldState, slot: Slot) -> bool:
    """Return True for a state dict whose step's checkpoint may be saved with one of its own."""
    checkpoint = fold.state.steps[slot.step].kinds.get("checkpoint")
    return slot.kind == "state_dict" and (checkpoint is None or checkpoint.outcome is None)


def save_failed(fold: FoldState, event: SaveFailed, _: Envelope) -> None:
    """Record that an attempt failed; announce it unless the worker tries again."""
    if event.followed:
        end_attempt(fold, event.save_id)
        slot = fold.find_slot(event.slot)
        if slot is not None:
            _remove_attempt(slot, event.save_id)
        return
    _fail_attempt(fold, event.save_id, event.slot, f"{event.error_type}: {event.message}")


def lease_expired(fold: FoldState, event: LeaseExpired, _: Envelope) -> None:
    """Fail the attempts of a process without a heartbeat for its whole lease.

    The trainer is silent then, and an explorer is lost. Its waits are over. One that was taken for
    dead in error reports its waits again.
    """
    name = format_producer(event.holder)
    trainer, explorer = fold.state.trainer_lease, fold.state.explorers.get(name)
    if trainer is not None and trainer.holder == event.holder:
        fold.state.trainer_lease = structs.replace(trainer, silent_at=fold.now)
    lease = None if explorer is None else explorer.lease
    if explorer is not None and lease is not None and lease.holder == event.holder:
        explorer.lease = structs.replace(lease, silent_at=fold.now)
    forget_waits(fold, name)
    silence = f"nothing was heard of {name} on {event.holder.node}"
    for attempt in event.attempts:
        slot = fold.find_slot(attempt.slot)
        # A reason that the attempt itself gave stays.
        if slot is None or attempt.save_id not in slot.failed:
            reason = f"{silence} for {event.lease:g} s"
            _fail_attempt(fold, attempt.save_id, attempt.slot, reason)


def _fail_attempt(fold: FoldState, save_id: str, at: Slot, cause: str) -> None:
    """End an attempt, and announce that its step failed if no other attempt has finished."""
    end_attempt(fold, save_id)
    slot = fold.ensure_slot(at)
    if slot is None:
        return
    # Read before the removal, which forgets it.
    again = save_id in slot.running
    _remove_attempt(slot, save_id)
    reason = f"{format_slot(at)} failed: {cause}"[:LONGEST_REASON]
    if slot.proof is not None:
        if again and _awaits_checkpoint(fold, at):
            _fail_own_state_dict(fold, at.step, reason)
        return
    slot.failed[save_id] = reason
    trim_oldest(slot.failed, KEPT_ATTEMPTS)
    announce_failure(fold, at.step, at.kind, reason)


def _fail_own_state_dict(fold: FoldState, step: int, reason: str) -> None:
    """Fail a checkpoint whose own state dict failed, now or once its commit names it."""
    kinds = fold.state.steps[step].kinds
    checkpoint = kinds.get("checkpoint")
    if checkpoint is None or checkpoint.committed_at is None:
        kinds["state_dict"].later_failure = reason
    elif checkpoint.own_state_dict:
        announce_failure(fold, step, "checkpoint", reason)


def deadline_reached(fold: FoldState, event: DeadlineReached, _: Envelope) -> None:
    """Fail a kind of a step that was not complete in time after its commit."""
    step = fold.state.steps.get(event.step)
    kind = None if step is None else step.kinds.get(event.kind)
    if step is None or kind is None or kind.committed_at is None:
        return
    lacks = ", ".join(format_missing(step, event.kind, fold.now))
    reason = f"{event.kind} of step {event.step} was not complete {event.seconds:g} s "
    reason += f"after its commit: it lacks {lacks}"
    announce_failure(fold, event.step, event.kind, reason[:LONGEST_REASON])
    if kind.with_state_dict and not step.kinds["state_dict"].settled:
        # The state dict has no commit of its own: it shares its checkpoint's deadline.
        announce_failure(fold, event.step, "state_dict", reason[:LONGEST_REASON])


def step_committed(fold: FoldState, event: StepCommitted, _: Envelope) -> None:
    """Record that the saves of a kind of a step are dispatched, and add their registrations."""
    state = fold.state
    kind = fold.ensure_kind(event.step, event.kind)
    if kind is None:
        return
    # A loop without rollouts from this log reports its metrics here; kinds may commit one step.
    if event.step > state.trainer_step and state.ledger is None:
        state.learning.add(event.step, fold.now, event.metrics)
    state.trainer_step = max(state.trainer_step, event.step)
    for registration in event.registrations:
        _register(fold, event.step, registration)
    if kind.committed_at is None:
        kind.committed_at = fold.now
        if event.kind == "checkpoint":
            _decide_state_dict(fold, event, kind)
    # All registrations are added first: a commit of one kind may settle another.
    announce_complete(fold, event.step, event.kind)
    for registration in event.registrations:
        if registration.kind != event.kind:
            announce_complete(fold, event.step, registration.kind)


def _decide_state_dict(fold: FoldState, event: StepCommitted, checkpoint: KindState) -> None:
    """Decide by a checkpoint's commit if it rests on the step's state dict.

    The trainer's order decides, so that workers' events in another order make no difference.
    """
    state_dict = fold.state.steps[event.step].kinds.get("state_dict")
    checkpoint.with_state_dict = state_dict is not None and (
        state_dict.compacted or bool(state_dict.registrations)
    )
    checkpoint.own_state_dict = any(
        registration.kind == "state_dict" and (registration.expected or registration.slots)
        for registration in event.registrations
    )
    if not checkpoint.with_state_dict or state_dict is None:
        return
    if state_dict.is_failed:
        announce_failure(fold, event.step, "checkpoint", state_dict.failure or "")
    elif checkpoint.own_state_dict and state_dict.later_failure is not None:
        announce_failure(fold, event.step, "checkpoint", state_dict.later_failure)


def _is_saved(slot: SlotState, path: str | None) -> bool:
    """Return True if an attempt that writes to ``path`` repeats a finished one of the slot."""
    if slot.proof is None:
        return False
    folder = parse_staged_folder(path) or ""
    return not folder or folder in slot.folders


def _remove_attempt(slot: SlotState, save_id: str) -> None:
    """Remove an attempt from those of a slot that wait or run."""
    for attempts in (slot.waiting, slot.running, slot.progress):
        attempts.pop(save_id, None)


def _begin_attempt(
    fold: FoldState, save_id: str, slot: Slot, holder: Producer, lease: float | None
) -> Attempt:
    """Return an attempt, added if the state has none."""
    attempts = fold.state.attempts
    attempt = attempts.get(save_id)
    if attempt is None:
        attempt = attempts[save_id] = Attempt(slot=slot, holder=holder, since=fold.now, lease=lease)
        if len(attempts) > KEPT_UNDER_WAY:
            # Not just dropped: it may have the turn that others wait for.
            end_attempt(fold, next(iter(attempts)))
    return attempt


def end_attempt(fold: FoldState, save_id: str) -> None:
    """Remove an attempt, and pass its turn to the next group."""
    state = fold.state
    if state.attempts.pop(save_id, None) is not None and admission.is_limited(state):
        _grant_turns(fold, admission.release_turn(state, save_id))


def _end_previous_attempt(fold: FoldState, slot: Slot, holder: Producer) -> None:
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


def _grant_turns(fold: FoldState, save_ids: list[str]) -> None:
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
