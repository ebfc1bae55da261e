"""Categories of events for timelines: a colour and a row of the legend each."""

from __future__ import annotations

from msgspec import Struct

from trinity_schemas import (
    EVENT_TYPES,
    AlarmCleared,
    AlarmRaised,
    ConsumerDetached,
    DeadlineReached,
    EpochClosed,
    EpochOpened,
    EvaluationFailed,
    EvaluationFinished,
    EvaluationStarted,
    Event,
    ExplorerExcluded,
    ExplorerStatusChanged,
    GenerationPaused,
    GenerationResumed,
    LeaseExpired,
    LedgerRestored,
    PhasesMeasured,
    ProfileWritten,
    PublicationStarted,
    ResendRequested,
    RewardErrorReported,
    RolloutsDispatched,
    RunClosed,
    RunOpened,
    RunResumed,
    SaveFailed,
    SaveFinished,
    SaveGranted,
    SaveProgressed,
    SaveRequested,
    SaveStarted,
    StacksTaken,
    StepCommitted,
    StepFailed,
    StepReady,
    StepSuperseded,
    StepTrained,
    SyncRequested,
    ThreadCountRegistered,
    TrainerStatusChanged,
    TrainingEnded,
    VersionOpened,
    VersionPartPublished,
    VersionRefused,
    VersionResent,
    VersionRetired,
    WaitEnded,
    WaitStarted,
    WeightsApplied,
    event_tag,
)

from ..analysis.event_filter import find_steps

CATEGORIES = ("run", "train", "rollouts", "save", "publish", "apply", "wait", "failure", "ready")
"""Names of the categories; their places are the numbers in all answers."""

_OF: dict[str, tuple[type[Struct], ...]] = {
    "run": (
        *(RunOpened, RunResumed, RunClosed, EpochOpened, EpochClosed),
        *(ConsumerDetached, PhasesMeasured),
    ),
    "train": (
        StepCommitted,
        StepTrained,
        ThreadCountRegistered,
        TrainerStatusChanged,
        TrainingEnded,
        ProfileWritten,
        EvaluationStarted,
        EvaluationFinished,
        AlarmCleared,
    ),
    "rollouts": (RolloutsDispatched, LedgerRestored),
    "save": (SaveRequested, SaveGranted, SaveStarted, SaveProgressed, SaveFinished),
    "publish": (
        VersionOpened,
        PublicationStarted,
        VersionPartPublished,
        VersionResent,
        VersionRetired,
    ),
    "apply": (WeightsApplied, GenerationPaused, GenerationResumed),
    "wait": (
        WaitStarted,
        WaitEnded,
        StacksTaken,
        SyncRequested,
        ResendRequested,
        ExplorerStatusChanged,
    ),
    "failure": (
        SaveFailed,
        VersionRefused,
        LeaseExpired,
        DeadlineReached,
        StepFailed,
        EvaluationFailed,
        ExplorerExcluded,
        RewardErrorReported,
        AlarmRaised,
    ),
    "ready": (StepReady, StepSuperseded),
}
CATEGORY: dict[type, int] = {
    event: CATEGORIES.index(name) for name, events in _OF.items() for event in events
}
"""Event type to the number of its category."""
FAILURE = CATEGORIES.index("failure")
READY = CATEGORIES.index("ready")

TYPES: tuple[str, ...] = tuple(event_tag(event_type) for event_type in EVENT_TYPES)
"""Tags of all events."""
TYPE_BIT: dict[type, int] = {
    event_type: 1 << number for number, event_type in enumerate(EVENT_TYPES)
}
"""Event type to its bit in the sets of blocks."""
BIT_OF_TAG: dict[str, int] = {tag: 1 << number for number, tag in enumerate(TYPES)}


def find_category(event: Struct) -> int:
    """Return the number of an event's category; that of failures for a run that failed."""
    # By its reason: one type of event has both a good end and a bad one.
    if isinstance(event, RunClosed | EpochClosed) and event.reason != "finished":
        return FAILURE
    return CATEGORY[type(event)]


def find_step(event: Event) -> int | None:
    """Return the step that an event is about, the last one of several; None if it has none."""
    return max(find_steps(event), default=None)
