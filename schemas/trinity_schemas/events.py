"""Every event of a run, one tagged union. Changes only ever add optional fields."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from .identity import (
    Bytes,
    Count,
    Digest,
    Epoch,
    ExplorerStatus,
    Kind,
    Name,
    Rank,
    Registration,
    RelativePath,
    Seconds,
    Slot,
    Slug,
    Step,
    StepRef,
    Text,
    TrainerStatus,
)

EntryId = Annotated[str, Meta(pattern=r"^[0-9]{1,20}-[0-9]{1,20}$")]


def _kebab(name: str) -> str:
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name).lstrip("-")


class _Event(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=_kebab):
    """Base of all events: frozen, named by its kebab-case tag."""


# --- the run -------------------------------------------------------------------------------


class RunOpened(_Event, frozen=True):
    """A trainer took a new epoch of the run and starts from its beginning."""

    config_digest: Digest | None = None


class RunResumed(_Event, frozen=True):
    """A trainer took a new epoch of the run and goes on from ``step``."""

    step: Step


class RunClosed(_Event, frozen=True):
    """The run's present epoch ended; ``error`` says why when it did not end by itself."""

    reason: Literal["finished", "interrupted", "failed"]
    step: Step = 0
    error: Text | None = None


# --- saves ---------------------------------------------------------------------------------


class ThreadCountRegistered(_Event, frozen=True):
    """A step is to expect this many saves of this kind."""

    step: Step
    registration: Registration


class SaveStarted(_Event, frozen=True):
    """A worker began an attempt at a slot."""

    save_id: Slug
    slot: Slot
    path: RelativePath | None = None


class SaveFinished(_Event, frozen=True):
    """An attempt is durable where its path says."""

    save_id: Slug
    slot: Slot
    path: RelativePath | None = None
    bytes: Bytes = 0
    seconds: Seconds = 0.0
    digest: Digest | None = None


class SaveFailed(_Event, frozen=True):
    """An attempt ended without a result."""

    save_id: Slug
    slot: Slot
    error_type: Name
    message: Text = ""


class StepCommitted(_Event, frozen=True):
    """All saves of this kind of the step are dispatched.

    Carries the registrations again, so that this event alone establishes what to expect, and
    may carry the training step's metrics, for those who watch.
    """

    step: Step
    kind: Kind
    registrations: tuple[Registration, ...] = ()
    metrics: dict[str, float] = {}


# --- weight versions -----------------------------------------------------------------------


class VersionOpened(_Event, frozen=True):
    """A weight version will be published by these ranks."""

    step: Step
    ranks: tuple[Rank, ...]
    transport: Slug


class VersionPartPublished(_Event, frozen=True):
    """One rank's part of a version is whole and readable."""

    step: Step
    rank: Rank
    manifest_digest: Digest
    bytes: Bytes
    tensors: Count
    chunks: Count
    seconds: Seconds = 0.0


class VersionRetired(_Event, frozen=True):
    """The version is superseded and its memory may be freed."""

    epoch: Epoch
    step: Step


class AppliedPhases(Struct, frozen=True, kw_only=True):
    """Seconds a consumer spent on a version: bytes fetched and verified, engine held."""

    fetch: Seconds
    pause: Seconds


class WeightsApplied(_Event, frozen=True):
    """A consumer serves this version from now on; the digest is of what it installed."""

    version: StepRef
    digest: Digest
    bytes: Bytes
    verified_at: float
    phases: AppliedPhases


# --- announcements, written by the reducer alone -------------------------------------------


class SaveProof(Struct, frozen=True, kw_only=True):
    """One finished slot that a ready step rests on."""

    slot: Slot
    save_id: Slug
    bytes: Bytes
    digest: Digest | None = None


class PublishedPart(Struct, frozen=True, kw_only=True):
    """One rank's part that a ready weight version rests on."""

    rank: Rank
    manifest_digest: Digest
    bytes: Bytes


class StepReady(_Event, frozen=True):
    """A kind of a step is proven complete. Announced once per (epoch, step, kind).

    ``version_digest`` and ``parts`` are there for weights; for files ``saves`` (the first of
    them, ``save_count`` in all) and ``path``, where they were written before they got their name.
    """

    epoch: Epoch
    step: Step
    kind: Kind
    caused_by: EntryId
    saves: tuple[SaveProof, ...] = ()
    save_count: Count = 0
    path: RelativePath | None = None
    parts: tuple[PublishedPart, ...] = ()
    version_digest: Digest | None = None
    transport: Slug | None = None


class StepFailed(_Event, frozen=True):
    """A kind of a step failed. Not final: a retry can still make it ready."""

    epoch: Epoch
    step: Step
    kind: Kind
    caused_by: EntryId
    reason: Text


class StepSuperseded(_Event, frozen=True):
    """A kind of a step completed, or was given up, after ``by`` had taken its place."""

    epoch: Epoch
    step: Step
    kind: Kind
    caused_by: EntryId
    by: StepRef


# --- status --------------------------------------------------------------------------------


class TrainerStatusChanged(_Event, frozen=True):
    """The trainer's status."""

    status: TrainerStatus
    step: Step = 0


class ExplorerStatusChanged(_Event, frozen=True):
    """One explorer's status; which one is the envelope's producer."""

    status: ExplorerStatus


Event = (
    RunOpened
    | RunResumed
    | RunClosed
    | ThreadCountRegistered
    | SaveStarted
    | SaveFinished
    | SaveFailed
    | StepCommitted
    | VersionOpened
    | VersionPartPublished
    | VersionRetired
    | WeightsApplied
    | StepReady
    | StepFailed
    | StepSuperseded
    | TrainerStatusChanged
    | ExplorerStatusChanged
)
Announcement = StepReady | StepFailed | StepSuperseded | VersionRetired

EVENT_TYPES: tuple[type[Struct], ...] = Event.__args__
ANNOUNCEMENT_TYPES: tuple[type[Struct], ...] = Announcement.__args__


def event_tag(event: type[Struct] | Struct) -> str:
    """The kebab-case tag by which an event is known on the wire."""
    return str(event.__struct_config__.tag)
