"""Announcements that follow from complete steps, and those that are current in a state.

The current ones are what ``subscribe(start="current")`` delivers first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from trinity_schemas import (
    ANNOUNCEMENT_TYPES,
    Announcement,
    Envelope,
    EpochClosed,
    EpochOpened,
    Kind,
    PublicationStarted,
    SaveGranted,
    StepFailed,
    StepReady,
    StepRef,
    StepSuperseded,
    TrainingEnded,
    VersionResent,
    VersionRetired,
    event_tag,
    version_digest,
)
from trinity_schemas.envelope import MEANING_SINCE

from .best_checkpoint import complete_score
from .compaction import compact_step
from .completeness import Completion, count_registered, find_completion, has_all_parts
from .evaluations import open_versions
from .fold_state import FoldState
from .limits import (
    KEPT_BASES,
    KEPT_COMPLETE_CHECKPOINTS,
    KEPT_EVALUATED,
    KEPT_VERSIONS,
    MOST_PROOFS,
)
from .state import (
    KINDS,
    DeltaBases,
    KindState,
    MonitorState,
    ReadyPointer,
    StepState,
    VersionState,
)

_WITHOUT_KIND = (EpochOpened, EpochClosed, TrainingEnded, PublicationStarted, VersionResent)
OF_AN_EPOCH = (
    *(
        f"{event_tag(event)}/{kind}"
        for event in (StepReady, StepFailed, StepSuperseded)
        for kind in KINDS
        if not (event is StepReady and kind == "weights")
    ),
    *(event_tag(event) for event in _WITHOUT_KIND if event is not EpochOpened),
)
"""Subjects that are current only in their epoch: a resume may go back to an earlier step."""


def announce_complete(fold: FoldState, step: int, kind: Kind) -> None:
    """Announce a kind of a step, and the kinds that rest on it, if they are complete now."""
    step_state = fold.state.steps[step]
    if kind == "weights":
        _announce_if_complete(fold, step, step_state, "weights")
    else:
        # The state dict goes first: a reader of the checkpoint's announcement finds both ready.
        _announce_if_complete(fold, step, step_state, "state_dict")
        _announce_if_complete(fold, step, step_state, "checkpoint")


def _announce_if_complete(fold: FoldState, step: int, step_state: StepState, kind: Kind) -> None:
    kind_state = step_state.kinds.get(kind)
    if kind_state is None or kind_state.outcome is not None:
        return
    completion = None if kind == "weights" else find_completion(step_state, kind)
    if completion is not None:
        # Empty, and not None, for saves outside of staging: recorded states have it so (decision
        # 45).
        kind_state.folder = completion.folder or ""
        _check_registered(fold, step, kind, kind_state)
    elif kind != "weights" or not has_all_parts(step_state):
        return
    state = fold.state
    at = StepRef(state.epoch, step)
    pointer = state.ready.get(kind)
    # Pointers never go back (invariant 4 in docs/reliability.md): a late step has been passed.
    if pointer is not None and pointer.at > at:
        kind_state.outcome = "superseded"
        supersede(fold, state.epoch, step, kind, pointer.at)
        # Its folder gets a final name all the same, and retention has to count it.
        if kind == "checkpoint":
            _add_complete_checkpoint(fold, step)
        compact_step(state, step)
        return
    kind_state.outcome = "ready"
    if completion is not None:
        _announce_files(fold, at, kind, completion)
    else:
        assert step_state.version is not None
        _announce_version(fold, at, step_state.version)
    # The pointer of another epoch names a step that this state no longer has.
    if pointer is not None and pointer.at.epoch == at.epoch:
        compact_step(state, pointer.at.step)


def _check_registered(fold: FoldState, step: int, kind: Kind, kind_state: KindState) -> None:
    """Add an anomaly if a kind has more saves than were registered."""
    expected = count_registered(kind_state)
    if kind_state.finished > expected:
        fold.add_anomaly(
            "unregistered",
            f"{kind_state.finished} saves of {kind} step {step} were made, and {expected} "
            "registered",
        )


def _announce_files(fold: FoldState, at: StepRef, kind: Kind, completion: Completion) -> None:
    path = completion.folder
    fold.state.ready[kind] = ReadyPointer(at=at, entry_id=fold.entry_id, path=path)
    fold.announcements.append(
        StepReady(
            epoch=at.epoch,
            step=at.step,
            kind=kind,
            caused_by=fold.entry_id,
            saves=completion.proofs[:MOST_PROOFS],
            save_count=completion.count,
            path=path,
        )
    )
    if kind == "checkpoint":
        _add_complete_checkpoint(fold, at.step)


def _announce_version(fold: FoldState, at: StepRef, version: VersionState) -> None:
    # By rank, not by arrival: the digest of a version must not depend on the order of its parts.
    parts = tuple([version.parts[rank] for rank in sorted(version.ranks)])
    digest = version_digest([(part.rank, part.manifest_digest) for part in parts])
    fold.state.ready["weights"] = ReadyPointer(at=at, entry_id=fold.entry_id, digest=digest)
    fold.announcements.append(
        StepReady(
            epoch=at.epoch,
            step=at.step,
            kind="weights",
            caused_by=fold.entry_id,
            parts=parts,
            version_digest=digest,
            transport=version.transport,
        )
    )
    fold.state.versions.append(at)
    bases = {part.base for part in parts if part.base is not None}
    if bases:
        oldest_bases = tuple(sorted(bases)[:KEPT_BASES])
        fold.state.delta_bases.append(DeltaBases(version=at, bases=oldest_bases))
    retire_versions(fold)


def _add_complete_checkpoint(fold: FoldState, step: int) -> None:
    """Add a step to those that have a complete checkpoint."""
    complete = fold.state.complete_checkpoints
    insort(complete, step)
    del complete[:-KEPT_COMPLETE_CHECKPOINTS]
    complete_score(fold.state, step)


def announce_since_2(fold: FoldState, envelope: Envelope, announcement: Announcement) -> None:
    """Announce what version 2 of the contract added; nothing for an event of an older sender.

    A log of version 1 then gives the announcements that were written when it was made.
    """
    if envelope.schema_version >= MEANING_SINCE[type(envelope.event)]:
        fold.announcements.append(announcement)


def announce_failure(fold: FoldState, step: int, kind: Kind, reason: str) -> None:
    """Announce that a kind of a step failed, unless it is ready or has failed before."""
    kinds = fold.state.steps[step].kinds
    kind_state = kinds[kind]
    if kind_state.settled:
        return
    kind_state.failure = reason
    fold.announcements.append(
        StepFailed(
            epoch=fold.state.epoch,
            step=step,
            kind=kind,
            caused_by=fold.entry_id,
            reason=reason,
        )
    )
    checkpoint = kinds.get("checkpoint")
    if kind == "state_dict" and checkpoint is not None and checkpoint.with_state_dict:
        announce_failure(fold, step, "checkpoint", reason)  # It rests on the state dict.


def supersede(fold: FoldState, epoch: int, step: int, kind: Kind, by: StepRef) -> None:
    """Announce that a newer step takes the place of a kind of a step."""
    fold.announcements.append(
        StepSuperseded(epoch=epoch, step=step, kind=kind, caused_by=fold.entry_id, by=by)
    )
    # Ranks may have published parts of it, which only a retirement removes.
    if kind == "weights":
        fold.announcements.append(VersionRetired(epoch=epoch, step=step))


def retire_versions(fold: FoldState) -> None:
    """Retire all versions but the newest ones, those of open evaluations, and their bases."""
    state = fold.state
    live_versions = set(state.versions[-KEPT_VERSIONS:])
    if state.evaluations:
        evaluated = open_versions(state).intersection(state.versions[:-KEPT_VERSIONS])
        live_versions.update(sorted(evaluated)[:KEPT_EVALUATED])
    if state.delta_bases:
        state.delta_bases = [delta for delta in state.delta_bases if delta.version in live_versions]
        # A delta can be read only while its base can (decision 16).
        live_versions.update(base for delta in state.delta_bases for base in delta.bases)
    for version in state.versions:
        if version not in live_versions:
            fold.announcements.append(VersionRetired(epoch=version.epoch, step=version.step))
    state.versions = [version for version in state.versions if version in live_versions]


def subject(envelope: Envelope) -> str:
    """Return the subject of an announcement: its type, and its kind if there are several."""
    event = envelope.event
    assert isinstance(event, ANNOUNCEMENT_TYPES)
    if isinstance(event, _WITHOUT_KIND):
        return event_tag(event)
    return f"{event_tag(event)}/{getattr(event, 'kind', 'weights')}"


def newest_subjects(announcements: Sequence[Envelope], state: MonitorState) -> list[str]:
    """Return the subject of each current announcement that is its newest; empty for the others."""
    subjects = [""] * len(announcements)
    subject_keys = set[tuple[type, str]]()
    # From the end: the first one of a type and kind is its newest.
    for at, envelope in reversed(list(enumerate(announcements))):
        about = type(envelope.event), getattr(envelope.event, "kind", "weights")
        if about not in subject_keys and is_current(envelope, state):
            subject_keys.add(about)
            subjects[at] = subject(envelope)
    return subjects


def is_current(envelope: Envelope, state: MonitorState) -> bool:
    """Return True if an announcement is current: weights in any epoch, files in their own.

    A retired version stays retired in later epochs. A grant is never current: it answers one
    attempt, which listened when it asked.
    """
    event = envelope.event
    if isinstance(event, SaveGranted):
        return False
    of_weights = isinstance(event, StepReady) and event.kind == "weights"
    return of_weights or isinstance(event, VersionRetired) or envelope.epoch == state.epoch
