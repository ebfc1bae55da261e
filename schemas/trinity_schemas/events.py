"""Every event of a run, one tagged union. Changes only ever add optional fields."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from .identity import (
    Bytes,
    Count,
    Digest,
    EntryId,
    Epoch,
    ExplorerStatus,
    Kind,
    Lease,
    Name,
    Process,
    Producer,
    Rank,
    Ranks,
    Registration,
    RelativePath,
    SaveId,
    SaveStrategy,
    Seconds,
    Slot,
    Slug,
    Step,
    StepRef,
    Text,
    TrainerStatus,
    Transport,
)


def _kebab(name: str) -> str:
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name).lstrip("-")


class _Event(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=_kebab):
    """Base of all events: frozen, named by its kebab-case tag."""


# --- the run -------------------------------------------------------------------------------


class ChosenTransport(Struct, frozen=True, kw_only=True):
    """How the run's weights are to travel, and why so."""

    name: Transport
    reason: Annotated[Text, Meta(description="In words.")]


class RunOpened(_Event, frozen=True):
    """A trainer took a new epoch of the run and starts from its beginning."""

    config_digest: Annotated[Digest | None, Meta(description="Of the run's configuration.")] = None
    config: Annotated[
        Text | None, Meta(description="JSON of what the run is, without places or secrets.")
    ] = None
    save_strategy: SaveStrategy = "unrestricted"
    transport: Annotated[
        ChosenTransport | None, Meta(description="How its weights are to travel, and why so.")
    ] = None


class RunResumed(_Event, frozen=True):
    """A trainer took a new epoch of the run and goes on from ``step``."""

    step: Step
    config: Annotated[
        Text | None, Meta(description="JSON of what the run is, without places or secrets.")
    ] = None
    save_strategy: SaveStrategy = "unrestricted"
    transport: Annotated[
        ChosenTransport | None, Meta(description="How its weights are to travel, and why so.")
    ] = None


class RunClosed(_Event, frozen=True):
    """The run's present epoch ended; ``error`` says why when it did not end by itself."""

    reason: Annotated[Literal["finished", "interrupted", "failed"], Meta(description="How.")]
    step: Annotated[Step | None, Meta(description="The last training step, if known.")] = None
    error: Annotated[Text | None, Meta(description="What went wrong.")] = None


# --- saves ---------------------------------------------------------------------------------


class ThreadCountRegistered(_Event, frozen=True):
    """A step is to expect this many saves of this kind."""

    step: Step
    registration: Registration


class SaveRequested(_Event, frozen=True):
    """A worker waits for its turn to begin an attempt; only under a limiting save strategy.

    Without a ``process`` the sender's incarnation stands for it; without a ``lease`` it sends no
    heartbeats, and its turn ends with the save alone.
    """

    save_id: SaveId
    slot: Slot
    process: Annotated[Process | None, Meta(description="Who will write.")] = None
    lease: Lease | None = None
    ranks: Ranks | None = None


class SaveStarted(_Event, frozen=True):
    """A worker began an attempt at a slot.

    With a ``lease`` it sends heartbeats, and is taken for dead once the last is as old as that.
    """

    save_id: SaveId
    slot: Slot
    path: RelativePath | None = None
    lease: Lease | None = None
    ranks: Ranks | None = None


class SaveProgressed(_Event, frozen=True):
    """How far a running attempt has come. Throttled by its sender; proves nothing."""

    save_id: SaveId
    slot: Slot
    bytes: Annotated[Bytes, Meta(description="Bytes written so far.")]
    total: Annotated[Bytes | None, Meta(description="Bytes to write, where known.")] = None


class SaveFinished(_Event, frozen=True):
    """An attempt is durable where its path says."""

    save_id: SaveId
    slot: Slot
    path: RelativePath | None = None
    bytes: Bytes = 0
    seconds: Seconds = 0.0
    digest: Digest | None = None
    ranks: Ranks | None = None


class SaveFailed(_Event, frozen=True):
    """An attempt ended without a result."""

    save_id: SaveId
    slot: Slot
    error_type: Annotated[Name, Meta(description="Class of the error.")]
    message: Annotated[Text, Meta(description="What the error says.")] = ""
    followed: Annotated[
        bool, Meta(description="It was given up because another's failed, which tells why itself.")
    ] = False


class StepCommitted(_Event, frozen=True):
    """All saves of this kind of the step are dispatched.

    Carries the registrations again, so that this event alone establishes what to expect, and
    may carry the training step's metrics, for those who watch.
    """

    step: Step
    kind: Kind
    registrations: Annotated[
        tuple[Registration, ...], Meta(description="What to expect, once more.")
    ] = ()
    metrics: Annotated[dict[str, float], Meta(description="Of the training step.")] = {}


# --- weight versions -----------------------------------------------------------------------


class VersionOpened(_Event, frozen=True):
    """A weight version will be published by these ranks."""

    step: Step
    ranks: Annotated[
        tuple[Rank, ...], Meta(max_length=16_384, description="Who will publish a part.")
    ]
    transport: Transport


class PartDelta(Struct, frozen=True, kw_only=True):
    """Of a part that holds what changed since an earlier version: how each tensor travelled."""

    base: Annotated[StepRef, Meta(description="The full version that it rests on.")]
    whole: Annotated[Bytes, Meta(description="Bytes that all tensors take in full.")]
    dense: Annotated[Count, Meta(description="Tensors that travelled in full.")]
    delta: Annotated[Count, Meta(description="Tensors of which changed elements travelled.")]
    skip: Annotated[Count, Meta(description="Tensors that did not change.")]
    changed: Annotated[int, Meta(ge=0, le=2**62, description="Elements that travelled as changed.")]
    elements: Annotated[
        int, Meta(ge=0, le=2**62, description="Elements of the tensors that they are of.")
    ]


class VersionPartPublished(_Event, frozen=True):
    """One rank's part of a version is whole and readable."""

    step: Step
    rank: Rank
    manifest_digest: Annotated[Digest, Meta(description="Seals the part: digest of its manifest.")]
    bytes: Bytes
    tensors: Annotated[Count, Meta(description="Tensors in the part.")]
    chunks: Annotated[Count, Meta(description="Chunks that hold them.")]
    seconds: Seconds = 0.0
    delta: Annotated[
        PartDelta | None, Meta(description="Where it is not full: what of it travelled.")
    ] = None
    save_id: Annotated[SaveId | None, Meta(description="The attempt that ends with it.")] = None


class VersionRetired(_Event, frozen=True):
    """The version is superseded and its memory may be freed."""

    epoch: Epoch
    step: Step


class AppliedPhases(Struct, frozen=True, kw_only=True):
    """Seconds a consumer spent on a version: bytes fetched and verified, engine held."""

    fetch: Annotated[Seconds, Meta(description="Until all bytes were fetched and verified.")]
    pause: Annotated[Seconds, Meta(description="For which the engine was held.")]


class WeightsApplied(_Event, frozen=True):
    """A consumer serves this version from now on; the digest is of what it installed."""

    version: Annotated[StepRef, Meta(description="What it serves.")]
    digest: Annotated[Digest, Meta(description="Of what it installed.")]
    bytes: Bytes
    verified_at: Annotated[
        float, Meta(description="When its last byte was verified, Unix seconds.")
    ]
    phases: AppliedPhases


class VersionRefused(_Event, frozen=True):
    """A consumer did not use a version: what it read of it is not what was published.

    The envelope's producer is the consumer, with its host. What it served before, it still serves.
    """

    version: Annotated[StepRef, Meta(description="What it refused.")]
    reason: Annotated[Text, Meta(description="Why, in words.")]
    rank: Annotated[Rank | None, Meta(description="Whose part is at fault, where one is.")] = None
    chunk: Annotated[
        Count | None, Meta(description="Which chunk of the part, from 0, where one is at fault.")
    ] = None


# --- announcements, written by the reducer alone -------------------------------------------


class SaveProof(Struct, frozen=True, kw_only=True):
    """One finished slot that a ready step rests on."""

    slot: Slot
    save_id: SaveId
    bytes: Bytes
    digest: Digest | None = None


class PublishedPart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's part that a ready weight version rests on."""

    rank: Rank
    manifest_digest: Digest
    bytes: Bytes
    base: Annotated[
        StepRef | None, Meta(description="The full version that it rests on, where it is a delta.")
    ] = None


class StepReady(_Event, frozen=True):
    """A kind of a step is proven complete. Announced once per (epoch, step, kind).

    ``version_digest`` and ``parts`` are there for weights; for files ``saves`` (the first of
    them, ``save_count`` in all) and ``path``, where they were written before they got their name.
    """

    epoch: Epoch
    step: Step
    kind: Kind
    caused_by: Annotated[EntryId, Meta(description="The event that made it true.")]
    saves: Annotated[
        tuple[SaveProof, ...], Meta(description="The finished slots it rests on.")
    ] = ()
    save_count: Annotated[Count, Meta(description="How many they are in all.")] = 0
    path: Annotated[
        RelativePath | None, Meta(description="The staged folder, which becomes global_step_N.")
    ] = None
    parts: Annotated[tuple[PublishedPart, ...], Meta(description="Of weights: every rank's.")] = ()
    version_digest: Annotated[
        Digest | None, Meta(description="Of weights: one digest of all parts.")
    ] = None
    transport: Transport | None = None


class StepFailed(_Event, frozen=True):
    """A kind of a step failed. Not final: a retry can still make it ready."""

    epoch: Epoch
    step: Step
    kind: Kind
    caused_by: Annotated[EntryId, Meta(description="The event that made it true.")]
    reason: Annotated[Text, Meta(description="Why, in words.")]


class StepSuperseded(_Event, frozen=True):
    """A kind of a step completed, or was given up, after ``by`` had taken its place."""

    epoch: Epoch
    step: Step
    kind: Kind
    caused_by: Annotated[EntryId, Meta(description="The event that made it true.")]
    by: Annotated[StepRef, Meta(description="What outranks it.")]


class SaveGranted(_Event, frozen=True):
    """The answer to ``save-requested``: the attempt may start, and has ``lease`` seconds for it.

    An announcement, since it follows from the log and is what the fold says in reply: workers
    listen where the reducer alone writes, so that nobody else can grant a turn.
    """

    epoch: Epoch
    save_id: SaveId
    slot: Slot
    caused_by: Annotated[EntryId, Meta(description="The event that made it true.")]
    lease: Annotated[
        Seconds, Meta(description="Seconds of silence after which it is taken back; 0 is never.")
    ]


# --- status --------------------------------------------------------------------------------


class TrainerWait(Struct, frozen=True, kw_only=True):
    """Wait of the trainer: for how much of what, and for whom."""

    what: Annotated[Name, Meta(description="What it waits for, such as experiences.")]
    step: Step
    have: Annotated[Count, Meta(description="How much of it is there.")]
    expected: Annotated[Count, Meta(description="How much of it is needed.")]
    missing: Annotated[
        tuple[Name, ...],
        Meta(max_length=16_384, description="Of whom it is not all there, as role-rank."),
    ]
    seconds: Annotated[Seconds, Meta(description="Seconds that it has waited so far.")]


class TrainerStatusChanged(_Event, frozen=True):
    """The trainer's status; with ``waits_for``, that it has waited for some seconds already."""

    status: Annotated[TrainerStatus, Meta(description="The new status.")]
    step: Step = 0
    waits_for: Annotated[
        TrainerWait | None, Meta(description="What it waits for; without it, for nothing long.")
    ] = None


class ExplorerStatusChanged(_Event, frozen=True):
    """One explorer's status; which one is the envelope's producer."""

    status: Annotated[ExplorerStatus, Meta(description="The new status.")]


class SyncRequested(_Event, frozen=True):
    """An explorer asks for weights; ``weights-applied`` of its own answers it."""

    wanted: Annotated[
        StepRef | None, Meta(description="The oldest version that will do; without it, any newer.")
    ] = None


# --- time, made an event by the leading reducer so that the fold needs no clock -------------


class ExpiredAttempt(Struct, frozen=True, kw_only=True):
    """An attempt of which nothing more is to be expected."""

    save_id: SaveId
    slot: Slot


class LeaseExpired(_Event, frozen=True):
    """A process was silent for its whole lease: its attempts failed.

    Not final: an attempt that finishes all the same counts, if its slot has no other.
    """

    holder: Annotated[Producer, Meta(description="Who was silent.")]
    lease: Annotated[Seconds, Meta(description="For how many seconds at least.")]
    attempts: Annotated[tuple[ExpiredAttempt, ...], Meta(description="What it had under way.")] = ()


class DeadlineReached(_Event, frozen=True):
    """A kind of a step was committed this long ago; what it still lacks is for the fold to say."""

    step: Step
    kind: Kind
    seconds: Annotated[Seconds, Meta(description="Seconds that it was given.")]


class ConsumerDetached(_Event, frozen=True):
    """A consumer group was idle for too long; the log no longer waits for it to be trimmed."""

    group: Annotated[Name, Meta(description="Name of the consumer group.")]
    stream: Annotated[Slug, Meta(description="What it read: events or announcements.")]
    position: Annotated[EntryId, Meta(description="The last entry that was delivered to it.")]
    pending: Annotated[Count, Meta(description="Entries delivered and never acknowledged.")] = 0
    idle: Annotated[Seconds, Meta(description="Seconds since it last asked for entries.")] = 0.0
    oldest_pending: Annotated[
        EntryId | None, Meta(description="Of what was never acknowledged, the oldest.")
    ] = None


Event = (
    RunOpened
    | RunResumed
    | RunClosed
    | ThreadCountRegistered
    | SaveRequested
    | SaveGranted
    | SaveStarted
    | SaveProgressed
    | SaveFinished
    | SaveFailed
    | StepCommitted
    | VersionOpened
    | VersionPartPublished
    | VersionRetired
    | StepReady
    | StepFailed
    | StepSuperseded
    | WeightsApplied
    | VersionRefused
    | TrainerStatusChanged
    | ExplorerStatusChanged
    | SyncRequested
    | LeaseExpired
    | DeadlineReached
    | ConsumerDetached
)
Announcement = StepReady | StepFailed | StepSuperseded | VersionRetired | SaveGranted

EVENT_TYPES: tuple[type[Struct], ...] = Event.__args__
ANNOUNCEMENT_TYPES: tuple[type[Struct], ...] = Announcement.__args__

SenderRole = Literal["trainer", "worker", "explorer", "reducer"]
SENT_BY: dict[type[Struct], SenderRole] = {
    RunOpened: "trainer",
    RunResumed: "trainer",
    RunClosed: "trainer",
    ThreadCountRegistered: "trainer",
    SaveRequested: "worker",
    SaveGranted: "reducer",
    SaveStarted: "worker",
    SaveProgressed: "worker",
    SaveFinished: "worker",
    SaveFailed: "worker",
    StepCommitted: "trainer",
    VersionOpened: "worker",
    VersionPartPublished: "worker",
    VersionRetired: "reducer",
    StepReady: "reducer",
    StepFailed: "reducer",
    StepSuperseded: "reducer",
    WeightsApplied: "explorer",
    VersionRefused: "explorer",
    TrainerStatusChanged: "trainer",
    ExplorerStatusChanged: "explorer",
    SyncRequested: "explorer",
    LeaseExpired: "reducer",
    DeadlineReached: "reducer",
    ConsumerDetached: "reducer",
}
"""Whose word each event is. The reducer's are announcements, made by the fold, or time passing."""


def event_tag(event: type[Struct] | Struct) -> str:
    """The kebab-case tag by which an event is known on the wire."""
    return str(event.__struct_config__.tag)
