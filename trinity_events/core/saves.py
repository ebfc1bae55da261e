"""The part of the fold that hears of saves: what is expected, attempts, turns, ends."""

from __future__ import annotations

from trinity_schemas import (
    DeadlineReached,
    Envelope,
    Kind,
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
    StepFailed,
    ThreadCountRegistered,
)

from ..checkpoint_layout import staged_in
from . import admission
from .announcements import AnnouncementFold
from .completeness import missing
from .fold_state import describe_producer, describe_slot, keep_last
from .limits import KEPT_ATTEMPTS, KEPT_UNDER_WAY, LONGEST_REASON
from .state import Attempt, KindState, SlotState


class SaveFold(AnnouncementFold):
    """What is said of saves, and of their turns."""

    def _registered(self, event: ThreadCountRegistered, _: Envelope) -> None:
        if self._register(event.step, event.registration):
            self._settle(event.step, event.registration.kind)

    def _register(self, step: int, registration: Registration) -> bool:
        kind = self._kind(step, registration.kind)
        if kind is None or kind.compacted:
            return False
        kind.registrations[registration.registration_id] = registration
        return True

    def _save_requested(self, event: SaveRequested, envelope: Envelope) -> None:
        state = self.state
        if event.save_id in state.attempts:
            if event.save_id not in state.turns:
                self._end_unended(event.slot, envelope.producer)
            return
        slot = self._slot(event.slot, event.ranks)
        if slot is not None and slot.proof is None:
            slot.failed.pop(event.save_id, None)
            slot.waiting[event.save_id] = self._now
            keep_last(slot.waiting, KEPT_ATTEMPTS)
        if event.process is None and not admission.limits(state):
            return  # recorded before turns were granted
        # Also for a slot that is finished or forgotten: whoever asks waits for an answer.
        self._end_unended(event.slot, envelope.producer)
        self._under_way(event.save_id, event.slot, envelope.producer, event.lease)
        group = admission.group_of(state, event, envelope.producer)
        self._grant(admission.ask(state, event.save_id, group))

    def _save_started(self, event: SaveStarted, envelope: Envelope) -> None:
        if event.slot.kind == "weights":
            self._part_begun(event, envelope)
            return
        slot = self._slot(event.slot, event.ranks)
        if slot is None or event.save_id in slot.failed or _is_saved(slot, event.path):
            if event.save_id not in self.state.attempts:
                return  # over before it began: sent late, or by who was taken for dead
        else:
            slot.waiting.pop(event.save_id, None)
            slot.running[event.save_id] = self._now
            if len(slot.running) > KEPT_ATTEMPTS:
                _end(slot, next(iter(slot.running)))
        if admission.limits(self.state) and event.save_id not in self.state.turns:
            who = describe_producer(envelope.producer)
            self._anomaly("out-of-turn", f"{who} began {describe_slot(event.slot)} without a turn")
        attempt = self._under_way(event.save_id, event.slot, envelope.producer, event.lease)
        attempt.started = True
        attempt.since = self._now

    def _part_begun(self, event: SaveStarted, envelope: Envelope) -> None:
        """A rank publishes its part, which needs no turn: all that matters is whether it lives."""
        kind = self._kind(event.slot.step, "weights")
        if kind is not None and kind.outcome is None:
            save_id, who = event.save_id, envelope.producer
            self._under_way(save_id, event.slot, who, event.lease).started = True

    def _save_progressed(self, event: SaveProgressed, _: Envelope) -> None:
        slot = self._find_slot(event.slot)
        if slot is not None and event.save_id in slot.running:
            slot.progress[event.save_id] = event.bytes

    def _save_finished(self, event: SaveFinished, _: Envelope) -> None:
        self._end_attempt(event.save_id)
        slot = self._slot(event.slot, event.ranks)
        if slot is None:
            return
        _end(slot, event.save_id)
        slot.failed.pop(event.save_id, None)
        kind = self.state.steps[event.slot.step].kinds[event.slot.kind]
        proof = SaveProof(
            slot=event.slot, save_id=event.save_id, bytes=event.bytes, digest=event.digest
        )
        if slot.proof is None:
            kind.finished += 1
            slot.proof, slot.path = proof, event.path
        elif not self._finished_again(slot, kind, proof, event.path):
            return
        self._settle(event.slot.step, event.slot.kind)

    def _finished_again(
        self, slot: SlotState, kind: KindState, proof: SaveProof, path: str | None
    ) -> bool:
        """Keep another finished attempt at a slot, if it is in another folder and may be needed."""
        before = slot.proof
        if before is None or before.save_id == proof.save_id:
            return False
        folder, newest = staged_in(path) or "", staged_in(slot.path) or ""
        if folder in (newest, *slot.others):
            wanted = False
        elif kind.outcome is None:
            slot.others[newest] = before
            slot.proof, slot.path = proof, path
            wanted = True
        else:
            wanted = self._awaits_checkpoint(proof.slot)
            if wanted:
                slot.others[folder] = proof
        keep_last(slot.others, KEPT_ATTEMPTS)
        if not wanted:
            self._anomaly("late-attempt", f"{describe_slot(proof.slot)} was finished before")
        return wanted

    def _awaits_checkpoint(self, slot: Slot) -> bool:
        """Return True for a state dict whose step's checkpoint may be saved with one of its own."""
        checkpoint = self.state.steps[slot.step].kinds.get("checkpoint")
        return slot.kind == "state_dict" and (checkpoint is None or checkpoint.outcome is None)

    def _save_failed(self, event: SaveFailed, _: Envelope) -> None:
        if event.followed:
            self._end_attempt(event.save_id)
            slot = self._find_slot(event.slot)
            if slot is not None:
                _end(slot, event.save_id)
            return
        self._fail_attempt(event.save_id, event.slot, f"{event.error_type}: {event.message}")

    def _lease_expired(self, event: LeaseExpired, _: Envelope) -> None:
        silence = f"nothing was heard of {describe_producer(event.holder)} on {event.holder.node}"
        for attempt in event.attempts:
            slot = self._find_slot(attempt.slot)
            # What the attempt itself said of its failure stands.
            if slot is None or attempt.save_id not in slot.failed:
                why = f"{silence} for {event.lease:g} s"
                self._fail_attempt(attempt.save_id, attempt.slot, why)

    def _fail_attempt(self, save_id: str, at: Slot, why: str) -> None:
        self._end_attempt(save_id)
        slot = self._slot(at)
        if slot is None:
            return
        again = save_id in slot.running
        _end(slot, save_id)
        reason = f"{describe_slot(at)} failed: {why}"[:LONGEST_REASON]
        if slot.proof is not None:
            if again and self._awaits_checkpoint(at):
                self._fail_own_state_dict(at.step, reason)
            return
        slot.failed[save_id] = reason
        keep_last(slot.failed, KEPT_ATTEMPTS)
        self._fail(at.step, at.kind, reason)

    def _fail_own_state_dict(self, step: int, reason: str) -> None:
        """Fail a checkpoint that needs what failed, now or when its commit says that it does."""
        kinds = self.state.steps[step].kinds
        checkpoint = kinds.get("checkpoint")
        if checkpoint is None or checkpoint.committed_at is None:
            kinds["state_dict"].later_failure = reason
        elif checkpoint.own_state_dict:
            self._fail(step, "checkpoint", reason)

    def _deadline_reached(self, event: DeadlineReached, _: Envelope) -> None:
        step = self.state.steps.get(event.step)
        kind = None if step is None else step.kinds.get(event.kind)
        if step is None or kind is None or kind.committed_at is None:
            return
        lacks = ", ".join(missing(step, event.kind, self._now))
        reason = f"{event.kind} of step {event.step} was not complete {event.seconds:g} s "
        reason += f"after its commit: it lacks {lacks}"
        self._fail(event.step, event.kind, reason[:LONGEST_REASON])
        if kind.with_state_dict and not step.kinds["state_dict"].settled:
            # It has no commit of its own, and so no deadline: it shares its checkpoint's.
            self._fail(event.step, "state_dict", reason[:LONGEST_REASON])

    def _fail(self, step: int, kind: Kind, reason: str) -> None:
        """Announce the failure, unless the kind is ready or was failed before."""
        kind_state = self.state.steps[step].kinds[kind]
        if not kind_state.settled:
            kind_state.failure = reason
            self._out.append(
                StepFailed(
                    epoch=self.state.epoch,
                    step=step,
                    kind=kind,
                    caused_by=self._entry_id,
                    reason=reason,
                )
            )
            checkpoint = self.state.steps[step].kinds.get("checkpoint")
            if kind == "state_dict" and checkpoint is not None and checkpoint.with_state_dict:
                self._fail(step, "checkpoint", reason)  # it rests on it

    def _committed(self, event: StepCommitted, _: Envelope) -> None:
        kind = self._kind(event.step, event.kind)
        if kind is None:
            return
        self.state.trainer_step = max(self.state.trainer_step, event.step)
        waits = self.state.trainer_waits
        if waits is not None and event.step >= waits.step:
            self.state.trainer_waits = None
        for registration in event.registrations:
            self._register(event.step, registration)
        if kind.committed_at is None:
            kind.committed_at = self._now
            if event.kind == "checkpoint":
                # Decided here, where the trainer's own order decides it: what the workers'
                # events overtake must not.
                state_dict = self.state.steps[event.step].kinds.get("state_dict")
                kind.with_state_dict = state_dict is not None and (
                    state_dict.compacted or bool(state_dict.registrations)
                )
                kind.own_state_dict = any(
                    one.kind == "state_dict" and (one.expected or one.slots)
                    for one in event.registrations
                )
                if kind.with_state_dict and state_dict is not None:
                    self._fail_with(event.step, kind, state_dict)
        # All registrations first: a commit of one kind may settle another.
        self._settle(event.step, event.kind)
        for registration in event.registrations:
            if registration.kind != event.kind:
                self._settle(event.step, registration.kind)

    def _fail_with(self, step: int, checkpoint: KindState, state_dict: KindState) -> None:
        """Fail a checkpoint, as it is committed, with what failed of the state dict it needs."""
        if state_dict.is_failed:
            self._fail(step, "checkpoint", state_dict.failure or "")
        elif checkpoint.own_state_dict and state_dict.later_failure is not None:
            self._fail(step, "checkpoint", state_dict.later_failure)

    # --- turns -----------------------------------------------------------------------------

    def _under_way(self, save_id: str, slot: Slot, who: Producer, lease: float | None) -> Attempt:
        attempts = self.state.attempts
        found = attempts.get(save_id)
        if found is None:
            since = self._now
            found = attempts[save_id] = Attempt(slot=slot, holder=who, since=since, lease=lease)
            if len(attempts) > KEPT_UNDER_WAY:
                self._end_attempt(next(iter(attempts)))
        return found

    def _end_attempt(self, save_id: str) -> None:
        """Nothing more is expected of the attempt: its turn, if it has one, passes on."""
        state = self.state
        if state.attempts.pop(save_id, None) is not None and admission.limits(state):
            self._grant(admission.leave(state, save_id))

    def _end_unended(self, slot: Slot, who: Producer) -> None:
        """Saves of one name follow each other: one that has a turn still was ended unheard."""
        attempts = self.state.attempts
        for save_id in list(self.state.turns):
            attempt = attempts.get(save_id)
            same = attempt is not None and attempt.slot.name == slot.name
            if same and attempt is not None and attempt.holder == who:
                self._anomaly(
                    "unended-turn", f"the end of {describe_slot(attempt.slot)} is not in the log"
                )
                self._end_attempt(save_id)

    def _grant(self, save_ids: list[str]) -> None:
        for save_id in save_ids:
            attempt = self.state.attempts[save_id]
            self._out.append(
                SaveGranted(
                    epoch=self.state.epoch,
                    save_id=save_id,
                    slot=attempt.slot,
                    caused_by=self._entry_id,
                    lease=attempt.lease or 0.0,
                )
            )


def _is_saved(slot: SlotState, path: str | None) -> bool:
    """Return True if a slot has a finished attempt that one in this path would be a repeat of."""
    if slot.proof is None:
        return False
    folder = staged_in(path) or ""
    return folder in ("", staged_in(slot.path), *slot.others)


def _end(slot: SlotState, save_id: str) -> None:
    """Nothing of the attempt is under way any more."""
    for under_way in (slot.waiting, slot.running, slot.progress):
        under_way.pop(save_id, None)
