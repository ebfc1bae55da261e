"""Current announcements, which ``subscribe(start="current")`` delivers first."""

from __future__ import annotations

from collections.abc import Sequence

from trinity_schemas import (
    ANNOUNCEMENT_TYPES,
    Envelope,
    EpochClosed,
    EpochOpened,
    PublicationStarted,
    SaveGranted,
    StepFailed,
    StepReady,
    StepSuperseded,
    TrainingEnded,
    VersionResent,
    VersionRetired,
    event_tag,
)

from .state import KINDS, MonitorState

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
