"""Which announcements hold now: what ``subscribe(start="current")`` begins with."""

from __future__ import annotations

from collections.abc import Sequence

from trinity_schemas import (
    ANNOUNCEMENT_TYPES,
    Envelope,
    SaveGranted,
    StepFailed,
    StepReady,
    StepSuperseded,
    VersionRetired,
    event_tag,
)

from .state import KINDS, MonitorState

OF_AN_EPOCH = tuple(
    f"{event_tag(one)}/{kind}"
    for one in (StepReady, StepFailed, StepSuperseded)
    for kind in KINDS
    if not (one is StepReady and kind == "weights")
)
"""What stands only in its epoch; a resume may have gone back behind it."""


def subject(envelope: Envelope) -> str:
    """What an announcement is the newest of: its type and its kind."""
    event = envelope.event
    assert isinstance(event, ANNOUNCEMENT_TYPES)
    return f"{event_tag(event)}/{getattr(event, 'kind', 'weights')}"


def newest_subjects(announcements: Sequence[Envelope], state: MonitorState) -> list[str]:
    """The subject of each that stands, and that none of the others follows; empty for the rest."""
    subjects = [""] * len(announcements)
    found = set[tuple[type, str]]()
    for at, one in reversed(list(enumerate(announcements))):
        about = type(one.event), getattr(one.event, "kind", "weights")
        if about not in found and is_current(one, state):
            found.add(about)
            subjects[at] = subject(one)
    return subjects


def is_current(envelope: Envelope, state: MonitorState) -> bool:
    """Whether an announcement holds now: weights until newer ones, files in their epoch.

    A version that was retired stays so in later epochs. A grant never stands: it answers one
    attempt, which was listening when it asked.
    """
    event = envelope.event
    if isinstance(event, SaveGranted):
        return False
    of_weights = isinstance(event, StepReady) and event.kind == "weights"
    return of_weights or isinstance(event, VersionRetired) or envelope.epoch == state.epoch
