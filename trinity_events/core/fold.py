"""The fold: from one entry of the log to the next state, and to what became true by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trinity_schemas import (
    Announcement,
    ConsumerDetached,
    DeadlineReached,
    Envelope,
    ExplorerStatusChanged,
    Kind,
    LeaseExpired,
    Producer,
    PublishedPart,
    Registration,
    RunClosed,
    RunOpened,
    RunResumed,
    SaveFailed,
    SaveFinished,
    SaveGranted,
    SaveProgressed,
    SaveProof,
    SaveRequested,
    SaveStarted,
    Sender,
    Slot,
    StepCommitted,
    StepFailed,
    StepReady,
    StepRef,
    StepSuperseded,
    SyncRequested,
    ThreadCountRegistered,
    TrainerStatusChanged,
    VersionOpened,
    VersionPartPublished,
    VersionRetired,
    WeightsApplied,
    event_tag,
    version_digest,
)

from . import admission
from .complete import is_complete, missing, slot_key, staged_in
from .state import (
    Anomaly,
    Attempt,
    DetachedConsumer,
    ExplorerState,
    KindState,
    MonitorState,
    ReadyPointer,
    Resting,
    SlotState,
    StepState,
    VersionState,
)

# Announcements are the fold's own, whichever process runs it: their producer, sequence and time
# follow from the log, so that a replay gives the very bytes that the live reducer wrote.
MONITOR = Producer(role="reducer", rank=0, node="log", incarnation="monitor")

KINDS: tuple[Kind, ...] = ("state_dict", "checkpoint", "weights")

KEPT_VERSIONS = 2
KEPT_BASES = 64
"""That one version rests on: as many as ranks began with a full version at other times."""
KEPT_STEPS = 128
KEPT_STEPS_AT_MOST = 4096
KEPT_ANOMALIES = 32
KEPT_CARRIED = 16
KEPT_PRODUCERS = 16_384
REORDERED_PRODUCERS = 4096
"""Of fewer, none is forgotten soon, and their order is not kept."""
KEPT_ATTEMPTS = 8
"""Of a slot, failed and waiting each."""
KEPT_EXPLORERS = 4096
KEPT_DETACHED = 32
KEPT_WHOLE = 1024
KEPT_UNDER_WAY = 16_384
"""Attempts under way at once; of more, the oldest are given up."""
LONGEST_REASON = 4000
MOST_PROOFS = 2048
"""Saves that an announcement lists; it counts them all."""

# Consumers outlive epochs: what is said by them and of them is not fenced.
_UNFENCED_EVENTS = (WeightsApplied, ExplorerStatusChanged, SyncRequested, ConsumerDetached)
_EPOCH_EVENTS = (RunOpened, RunResumed)


class Monitor:
    """Folds a run's log into its :class:`MonitorState`.

    Pure: the same entries give the same state and the same announcements, in the live reducer,
    in a replay and in a test. Duplicates, late attempts and events of another epoch change
    nothing and are counted as anomalies.
    """

    def __init__(self, state: MonitorState) -> None:
        self.state = state
        self._entry_id = state.position
        self._out: list[Announcement] = []

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

    @property
    def _now(self) -> int:
        """Milliseconds, as the server stamped the entry."""
        return int(self._entry_id.partition("-")[0])

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
        _keep_last(sequences, KEPT_PRODUCERS)
        if sequence <= last:
            self._anomaly("duplicate", f"{_who(producer)} sent its event {sequence} again")
            return False
        if sequence > last + 1:
            missing = f"{last + 1}" if sequence == last + 2 else f"{last + 1} to {sequence - 1}"
            self._anomaly("gap", f"of {_who(producer)}, event {missing} is not in the log")
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
            f"{_who(envelope.producer)}, while the run is in epoch {self.state.epoch}",
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
                    state.carried[folder] = left
                    break
            for kind, kind_state in step_state.kinds.items():
                if not kind_state.settled:
                    self._supersede(state.epoch, left, kind, StepRef(epoch, step))
        for folder in list(state.carried)[:-KEPT_CARRIED]:
            del state.carried[folder]
        state.epoch = epoch
        state.strategy = opening.save_strategy
        state.transport = opening.transport
        state.attempts, state.queue, state.turns = {}, {}, {}
        state.whole = [one for one in state.whole if one <= step]
        state.trainer_step = step
        state.steps = {}
        state.forgotten_through = -1
        state.closed = None
        if state.opened_at is None:
            state.opened_at = self._now

    def _run_closed(self, event: RunClosed, _: Envelope) -> None:
        self.state.closed = event.reason
        self.state.trainer = "stopped"

    # --- saves -----------------------------------------------------------------------------

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
        slot = self._slot(event.slot)
        if slot is not None and slot.proof is None:
            slot.failed.pop(event.save_id, None)
            slot.waiting[event.save_id] = self._now
            _keep_last(slot.waiting, KEPT_ATTEMPTS)
        if event.process is None and not admission.limits(state):
            return  # recorded before turns were granted
        # Also for a slot that is finished or forgotten: whoever asks waits for an answer.
        self._end_unended(event.slot, envelope.producer)
        self._under_way(event.save_id, event.slot, envelope.producer, event.lease)
        group = admission.group_of(state, event, envelope.producer)
        self._grant(admission.ask(state, event.save_id, group))

    def _save_started(self, event: SaveStarted, envelope: Envelope) -> None:
        slot = self._slot(event.slot)
        if slot is None or slot.proof is not None or event.save_id in slot.failed:
            if event.save_id not in self.state.attempts:
                return  # over before it began: sent late, or by who was taken for dead
        else:
            slot.waiting.pop(event.save_id, None)
            slot.running[event.save_id] = self._now
        if admission.limits(self.state) and event.save_id not in self.state.turns:
            who = _who(envelope.producer)
            self._anomaly("out-of-turn", f"{who} began {_slot(event.slot)} without a turn")
        attempt = self._under_way(event.save_id, event.slot, envelope.producer, event.lease)
        attempt.started = True
        attempt.since = self._now

    def _save_progressed(self, event: SaveProgressed, _: Envelope) -> None:
        slot = self._find_slot(event.slot)
        if slot is not None and event.save_id in slot.running:
            slot.progress[event.save_id] = event.bytes

    def _save_finished(self, event: SaveFinished, _: Envelope) -> None:
        self._end_attempt(event.save_id)
        slot = self._slot(event.slot)
        if slot is None:
            return
        _end(slot, event.save_id)
        slot.failed.pop(event.save_id, None)
        kind = self.state.steps[event.slot.step].kinds[event.slot.kind]
        if slot.proof is None:
            kind.finished += 1
        elif slot.proof.save_id == event.save_id:
            return
        elif kind.outcome is not None or staged_in(event.path) == staged_in(slot.path):
            self._anomaly("late-attempt", f"{_slot(event.slot)} was finished before")
            return
        slot.proof = SaveProof(
            slot=event.slot, save_id=event.save_id, bytes=event.bytes, digest=event.digest
        )
        slot.path = event.path
        self._settle(event.slot.step, event.slot.kind)

    def _save_failed(self, event: SaveFailed, _: Envelope) -> None:
        self._fail_attempt(event.save_id, event.slot, f"{event.error_type}: {event.message}")

    def _lease_expired(self, event: LeaseExpired, _: Envelope) -> None:
        silence = f"nothing was heard of {_who(event.holder)} on {event.holder.node}"
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
        _end(slot, save_id)
        if slot.proof is not None:
            return
        reason = f"{_slot(at)} failed: {why}"[:LONGEST_REASON]
        slot.failed[save_id] = reason
        _keep_last(slot.failed, KEPT_ATTEMPTS)
        self._fail(at.step, at.kind, reason)

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
                if kind.with_state_dict and state_dict is not None and state_dict.is_failed:
                    self._fail(event.step, "checkpoint", state_dict.failure or "")
        # All registrations first: a commit of one kind may settle another.
        self._settle(event.step, event.kind)
        for registration in event.registrations:
            if registration.kind != event.kind:
                self._settle(event.step, registration.kind)

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
                self._anomaly("unended-turn", f"the end of {_slot(attempt.slot)} is not in the log")
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

    # --- weight versions -------------------------------------------------------------------

    def _version_opened(self, event: VersionOpened, _: Envelope) -> None:
        version = self._version(event.step)
        if version is not None and not version.ranks:
            version.ranks = tuple(dict.fromkeys(event.ranks))
            version.transport = event.transport
            self._settle(event.step, "weights")

    def _part_published(self, event: VersionPartPublished, _: Envelope) -> None:
        step = event.step
        version = self._version(step)
        if version is None:
            return
        kind = self.state.steps[step].kinds["weights"]
        # A retry replaces what a failed attempt left, until the version is ready.
        if kind.outcome is None:
            delta = event.delta
            version.parts[event.rank] = PublishedPart(
                rank=event.rank,
                manifest_digest=event.manifest_digest,
                bytes=event.bytes,
                base=None if delta is None else delta.base,
            )
            if kind.committed_at is not None:  # most come before it
                self._settle(step, "weights")

    def _applied(self, event: WeightsApplied, envelope: Envelope) -> None:
        explorer = self._explorer(envelope.producer)
        explorer.version = event.version
        explorer.digest = event.digest
        explorer.applied_at = self._now
        if explorer.wanted is None or event.version >= explorer.wanted:
            explorer.wanted = explorer.requested_at = None

    # --- status ----------------------------------------------------------------------------

    def _trainer_status(self, event: TrainerStatusChanged, _: Envelope) -> None:
        self.state.trainer = event.status
        self.state.trainer_step = max(self.state.trainer_step, event.step)

    def _explorer_status(self, event: ExplorerStatusChanged, envelope: Envelope) -> None:
        self._explorer(envelope.producer).status = event.status

    def _sync_requested(self, event: SyncRequested, envelope: Envelope) -> None:
        explorer = self._explorer(envelope.producer)
        explorer.wanted = event.wanted
        explorer.requested_at = self._now

    def _explorer(self, producer: Producer) -> ExplorerState:
        explorers = self.state.explorers
        who = _who(producer)
        # Taken out and put back: whoever was silent longest goes first.
        found = explorers.pop(who, None) or ExplorerState()
        explorers[who] = found
        if len(explorers) > KEPT_EXPLORERS:
            _keep_last(explorers, KEPT_EXPLORERS)
        return found

    def _consumer_detached(self, event: ConsumerDetached, _: Envelope) -> None:
        detached = self.state.detached
        name = f"{event.stream}/{event.group}"
        detached.pop(name, None)
        detached[name] = DetachedConsumer(
            entry_id=self._entry_id,
            position=event.position,
            pending=event.pending,
            idle=event.idle,
        )
        _keep_last(detached, KEPT_DETACHED)

    # --- what becomes true -----------------------------------------------------------------

    def _settle(self, step: int, kind: Kind) -> None:
        """Announce the kind of the step, and what rests on it, if it is complete now."""
        step_state = self.state.steps[step]
        if kind == "weights":
            self._announce_if_complete(step, step_state, "weights")
        else:
            # The state dict goes first: who sees the checkpoint ready finds both ready.
            self._announce_if_complete(step, step_state, "state_dict")
            self._announce_if_complete(step, step_state, "checkpoint")

    def _announce_if_complete(self, step: int, step_state: StepState, kind: Kind) -> None:
        kind_state = step_state.kinds.get(kind)
        if kind_state is None or kind_state.outcome is not None:
            return
        if not is_complete(step_state, kind):
            return
        state = self.state
        at = StepRef(state.epoch, step)
        pointer = state.ready.get(kind)
        if pointer is not None and pointer.at > at:
            kind_state.outcome = "superseded"
            self._supersede(state.epoch, step, kind, pointer.at)
            self._compact(step)
        else:
            kind_state.outcome = "ready"
            self._announce_ready(at, step_state, kind)
            if pointer is not None and pointer.at.epoch == at.epoch:
                self._compact(pointer.at.step)

    def _announce_ready(self, at: StepRef, step_state: StepState, kind: Kind) -> None:
        path: str | None = None
        saves: tuple[SaveProof, ...] = ()
        save_count = 0
        parts: tuple[PublishedPart, ...] = ()
        digest: str | None = None
        transport: str | None = None
        if kind == "weights":
            assert step_state.version is not None
            version = step_state.version
            parts = tuple([version.parts[rank] for rank in sorted(version.ranks)])
            digest = version_digest([(part.rank, part.manifest_digest) for part in parts])
            transport = version.transport
        else:
            saves = proof(step_state, kind)
            save_count = step_state.kinds[kind].finished
            if step_state.kinds[kind].with_state_dict:
                save_count += step_state.kinds["state_dict"].finished
            path = staged_folder(step_state, kind)
        self.state.ready[kind] = ReadyPointer(
            at=at, entry_id=self._entry_id, path=path, digest=digest
        )
        self._out.append(
            StepReady(
                epoch=at.epoch,
                step=at.step,
                kind=kind,
                caused_by=self._entry_id,
                saves=saves[:MOST_PROOFS],
                save_count=save_count,
                path=path,
                parts=parts,
                version_digest=digest,
                transport=transport,
            )
        )
        if kind == "weights":
            self.state.versions.append(at)
            bases = {part.base for part in parts if part.base is not None}
            if bases:
                kept = tuple(sorted(bases)[:KEPT_BASES])
                self.state.resting.append(Resting(version=at, bases=kept))
            self._retire()
        elif kind == "checkpoint":
            self.state.whole.append(at.step)
            del self.state.whole[:-KEPT_WHOLE]

    def _supersede(self, epoch: int, step: int, kind: Kind, by: StepRef) -> None:
        self._out.append(
            StepSuperseded(epoch=epoch, step=step, kind=kind, caused_by=self._entry_id, by=by)
        )
        if kind == "weights":
            self._out.append(VersionRetired(epoch=epoch, step=step))

    def _retire(self) -> None:
        """Keep the newest versions and what they rest on; the others are retired."""
        state = self.state
        kept = set(state.versions[-KEPT_VERSIONS:])
        if state.resting:
            state.resting = [one for one in state.resting if one.version in kept]
            kept.update(base for one in state.resting for base in one.bases)
        for version in state.versions:
            if version not in kept:
                self._out.append(VersionRetired(epoch=version.epoch, step=version.step))
        state.versions = [version for version in state.versions if version in kept]

    def _compact(self, step: int) -> None:
        """Drop what a step's saves were, once all its kinds are over and none is the newest.

        What is kept answers for it: that it was ready, with how many saves, in which folder.
        """
        found = self.state.steps.get(step)
        if found is None:
            return
        at = StepRef(self.state.epoch, step)
        for name, kind in found.kinds.items():
            pointer = self.state.ready.get(name)
            if kind.outcome is None or pointer is None or pointer.at <= at:
                return
        folders = {
            name: None if name == "weights" else staged_folder(found, name) for name in found.kinds
        }
        for name, kind in found.kinds.items():
            if not kind.compacted:
                kind.folder = folders[name]
                kind.compacted = True
                kind.registrations, kind.slots = {}, {}
        found.version = None

    def _forget(self) -> None:
        """Drop the oldest steps of which nothing more can come, so that the state stays small."""
        steps = self.state.steps
        while len(steps) > KEPT_STEPS:
            oldest = next(iter(steps))
            if len(steps) <= KEPT_STEPS_AT_MOST and not self._is_over(oldest):
                return
            del steps[oldest]
            self.state.forgotten_through = max(self.state.forgotten_through, oldest)

    def _is_over(self, step: int) -> bool:
        at = StepRef(self.state.epoch, step)
        for kind, kind_state in self.state.steps[step].kinds.items():
            pointer = self.state.ready.get(kind)
            if not kind_state.settled and (pointer is None or pointer.at < at):
                return False
        return True

    # --- finding one's way -----------------------------------------------------------------

    def _step(self, step: int) -> StepState | None:
        state = self.state
        found = state.steps.get(step)
        if found is None:
            if step <= state.forgotten_through:
                self._anomaly("late", f"step {step} was settled long before")
                return None
            late = bool(state.steps) and step < next(reversed(state.steps))
            found = state.steps[step] = StepState()
            if late:  # seldom: they are kept in order, so that the oldest is the first
                state.steps = dict(sorted(state.steps.items()))
        return found

    def _kind(self, step: int, kind: Kind) -> KindState | None:
        step_state = self._step(step)
        if step_state is None:
            return None
        found = step_state.kinds.get(kind)
        if found is None:
            found = step_state.kinds[kind] = KindState()
        return found

    def _version(self, step: int) -> VersionState | None:
        found = self.state.steps.get(step)
        if found is not None and found.version is not None:
            return found.version
        if self._kind(step, "weights") is None:
            return None
        # A part may come before the event that opens its version.
        version = VersionState(ranks=(), transport="", opened_at=self._now)
        self.state.steps[step].version = version
        return version

    def _slot(self, slot: Slot) -> SlotState | None:
        kind = self._kind(slot.step, slot.kind)
        if kind is None:
            return None
        if kind.compacted:
            self._anomaly("late", f"{_slot(slot)} was settled before")
            return None
        key = slot_key(slot)
        found = kind.slots.get(key)
        if found is None:
            found = kind.slots[key] = SlotState(slot=slot)
        return found

    def _find_slot(self, slot: Slot) -> SlotState | None:
        """The slot, if anything is known of it."""
        step = self.state.steps.get(slot.step)
        kind = None if step is None else step.kinds.get(slot.kind)
        return None if kind is None else kind.slots.get(slot_key(slot))

    def _anomaly(self, name: str, detail: str) -> None:
        state = self.state
        state.anomaly_counts[name] = state.anomaly_counts.get(name, 0) + 1
        state.anomalies.append(Anomaly(entry_id=self._entry_id, name=name, detail=detail))
        del state.anomalies[:-KEPT_ANOMALIES]


def proof(step: StepState, kind: Kind) -> tuple[SaveProof, ...]:
    """The finished slots that a kind rests on; a checkpoint rests on its state dict's too."""
    kinds: list[Kind] = [kind, "state_dict"] if step.kinds[kind].with_state_dict else [kind]
    return tuple(
        slot.proof for one in kinds for slot in _finished(step.kinds[one]) if slot.proof is not None
    )


def staged_folder(step: StepState, kind: Kind) -> str | None:
    """The folder below :data:`STAGING` that all saves of the kind were written to, if any.

    Saves that named no path, or one of their caller's own, have none: nothing is to be moved.
    """
    state = step.kinds[kind]
    if state.compacted:
        return state.folder
    own = _finished(state)
    if not own and state.with_state_dict:
        return staged_folder(step, "state_dict")
    folders = {staged_in(slot.path) for slot in own}
    return folders.pop() if len(folders) == 1 else None


def _finished(kind: KindState) -> list[SlotState]:
    return [slot for _, slot in sorted(kind.slots.items()) if slot.proof is not None]


def _end(slot: SlotState, save_id: str) -> None:
    """Nothing of the attempt is under way any more."""
    for under_way in (slot.waiting, slot.running, slot.progress):
        under_way.pop(save_id, None)


def _keep_last(kept: dict[str, Any], most: int) -> None:
    """Bound what grows by one entry at a time; the order of insertion is that of the log."""
    if len(kept) > most:
        del kept[next(iter(kept))]


def _who(producer: Producer) -> str:
    return f"{producer.role}-{producer.rank}"


def _slot(slot: Slot) -> str:
    return f"{slot.name} of {slot.role}-{slot.rank} for {slot.kind} step {slot.step}"


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
    TrainerStatusChanged: Monitor._trainer_status,
    ExplorerStatusChanged: Monitor._explorer_status,
    SyncRequested: Monitor._sync_requested,
    LeaseExpired: Monitor._lease_expired,
    DeadlineReached: Monitor._deadline_reached,
    ConsumerDetached: Monitor._consumer_detached,
}
