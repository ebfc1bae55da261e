"""Handlers of events about a run: its epochs, its trainer, and its consumer groups."""

from __future__ import annotations

from trinity_schemas import (
    ConsumerDetached,
    Envelope,
    EpochClosed,
    EpochOpened,
    Kind,
    PhasesMeasured,
    ProfileWritten,
    RunClosed,
    RunOpened,
    RunResumed,
    StepRef,
    TrainerStatusChanged,
    TrainingEnded,
)

from ..announcements import announce_since_2, supersede
from ..best_checkpoint import continue_best
from ..evaluations import continue_evaluations
from ..fold_state import FoldState, format_producer, trim_oldest
from ..limits import KEPT_DETACHED, KEPT_HOSTS, KEPT_PENDING_PROMOTIONS, KEPT_PROFILES
from ..lineage import continued_lineage
from ..state import DetachedConsumer, MonitorState, ProcessHost, ProcessLease, Profile, ReadyPointer

LAUNCHER = "launcher-0"
"""Name of the process that starts the others of a run."""


def run_opened(fold: FoldState, event: RunOpened, envelope: Envelope) -> None:
    """Begin an epoch at step 0."""
    _open_epoch(fold, envelope.epoch, 0, event)
    _announce_opening(fold, event.config, envelope)


def run_resumed(fold: FoldState, event: RunResumed, envelope: Envelope) -> None:
    """Begin an epoch at the step that the trainer resumes from."""
    _open_epoch(fold, envelope.epoch, event.step, event)
    state = fold.state
    at = StepRef(state.epoch, event.step)
    kinds: tuple[Kind, ...] = ("state_dict", "checkpoint")
    for kind in kinds:
        # The pointer to the weights stays until the resumed trainer has published a version.
        old = state.ready.get(kind)
        if old is not None:
            state.ready[kind] = ReadyPointer(
                at=at,
                entry_id=fold.entry_id,
                # The staged folder is that of the old step.
                path=old.path if old.at.step == at.step else None,
                resumed=old.has_folder,
            )
    _announce_opening(fold, event.config, envelope)


def _announce_opening(fold: FoldState, config: str | None, envelope: Envelope) -> None:
    state = fold.state
    announce_since_2(
        fold,
        envelope,
        EpochOpened(
            epoch=state.epoch, step=state.trainer_step, caused_by=fold.entry_id, config=config
        ),
    )


def _open_epoch(fold: FoldState, epoch: int, step: int, opening: RunOpened | RunResumed) -> None:
    state = fold.state
    for old_step, step_state in sorted(state.steps.items()):
        for kind in ("checkpoint", "state_dict"):
            staged_kind = step_state.kinds.get(kind)
            if staged_kind is not None and staged_kind.outcome and staged_kind.folder:
                # The reducer may not have renamed it yet, and the step is dropped below.
                state.pending_promotions[staged_kind.folder] = old_step
                break
        for kind, kind_state in step_state.kinds.items():
            # No event of its epoch counts any more: readers that wait for the step get an end of
            # it.
            if not kind_state.settled:
                supersede(fold, state.epoch, old_step, kind, StepRef(epoch, step))
    for folder in list(state.pending_promotions)[:-KEPT_PENDING_PROMOTIONS]:
        del state.pending_promotions[folder]
    # Before `epoch` changes: the lineage is made of the epoch that ends.
    state.lineage = continued_lineage(state, opening)
    state.epoch = epoch
    # After the lineage, by which results stay or go.
    continue_evaluations(state)
    continue_best(state)
    state.learning.begin_epoch(step, opening.config)
    state.strategy = opening.save_strategy
    state.transport = opening.transport
    state.attempts, state.queue, state.turns = {}, {}, {}
    # Later ones are of the part of the old epoch that the resume discards.
    state.complete_checkpoints = [
        complete_step for complete_step in state.complete_checkpoints if complete_step <= step
    ]
    state.trainer, state.trainer_step, state.trainer_lease = None, step, None
    state.steps = {}
    # The new epoch makes steps of the same numbers again.
    state.forgotten_through = -1
    state.closed = state.closed_error = state.closed_at = None
    state.command, state.is_closed_for_good = opening.command, False
    state.waits, state.stacks, state.ledger = {}, {}, None
    # An explorer may outlive an epoch; all others are started with one.
    state.hosts = {name: host for name, host in state.hosts.items() if name in state.explorers}
    state.excluded, state.reward_errors, state.alarms = {}, {}, {}
    resumed = opening if isinstance(opening, RunResumed) else None
    state.changed_settings = [] if resumed is None else list(resumed.changed)
    state.skipped_checkpoints = [] if resumed is None else list(resumed.skipped)
    if state.opened_at is None:
        state.opened_at = fold.now


def record_host(state: MonitorState, envelope: Envelope) -> None:
    """Record the host of a new process.

    A run is opened by its launcher, under the trainer's name: the trainer may be on another host.
    """
    producer, names = envelope.producer, [format_producer(envelope.producer)]
    if isinstance(envelope.event, (RunOpened, RunResumed)):
        names.append(LAUNCHER)
    assert envelope.host_id is not None
    for name in names:
        state.hosts.pop(name, None)
        state.hosts[name] = ProcessHost(node=producer.node, host_id=envelope.host_id)
        trim_oldest(state.hosts, KEPT_HOSTS)


def run_closed(fold: FoldState, event: RunClosed, envelope: Envelope) -> None:
    """Record that the epoch ended, and its reason."""
    state = fold.state
    state.closed, state.closed_error = event.reason, event.error
    # Processes that end with the run may never report the end of their waits.
    state.closed_at, state.waits = fold.now, {}
    state.command = event.command
    state.is_closed_for_good = event.is_lasting
    state.trainer, state.trainer_lease = "stopped", None
    announce_since_2(
        fold,
        envelope,
        EpochClosed(
            epoch=state.epoch,
            caused_by=fold.entry_id,
            reason=event.reason,
            step=event.step,
            error=event.error,
        ),
    )


def trainer_status_changed(
    fold: FoldState, event: TrainerStatusChanged, envelope: Envelope
) -> None:
    """Record the trainer's status and its step."""
    state = fold.state
    state.trainer = event.status
    state.trainer_step = max(state.trainer_step, event.step)
    if event.status == "stopped":
        state.trainer_lease = None
        ended = TrainingEnded(epoch=state.epoch, step=state.trainer_step, caused_by=fold.entry_id)
        announce_since_2(fold, envelope, ended)
    elif event.lease is not None:
        state.trainer_lease = ProcessLease(holder=envelope.producer, lease=event.lease)


def profile_written(fold: FoldState, event: ProfileWritten, envelope: Envelope) -> None:
    """Store the profile among the last few."""
    profiles = fold.state.profiles
    by = format_producer(envelope.producer)
    profiles.append(Profile(step=event.step, by=by, path=event.path))
    del profiles[:-KEPT_PROFILES]


def phases_measured(_fold: FoldState, _event: PhasesMeasured, _: Envelope) -> None:
    """Change nothing: :mod:`trinity_events.analysis.goodput` reads it from the log."""


def consumer_detached(fold: FoldState, event: ConsumerDetached, _: Envelope) -> None:
    """Record a consumer group that no longer keeps the log from being trimmed."""
    detached = fold.state.detached
    name = f"{event.stream}/{event.group}"
    detached.pop(name, None)
    detached[name] = DetachedConsumer(
        entry_id=fold.entry_id,
        position=event.position,
        pending=event.pending,
        idle=event.idle,
        oldest_pending=event.oldest_pending,
    )
    trim_oldest(detached, KEPT_DETACHED)
