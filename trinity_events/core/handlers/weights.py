"""Handlers of events about weights: versions and their parts, and the explorers that use them."""

from __future__ import annotations

from msgspec import structs

from trinity_schemas import (
    Envelope,
    ExplorerStatusChanged,
    GenerationPaused,
    GenerationResumed,
    Producer,
    PublicationStarted,
    PublishedPart,
    ResendRequested,
    StepRef,
    SyncRequested,
    VersionOpened,
    VersionPartPublished,
    VersionRefused,
    VersionResent,
    WeightsApplied,
)

from ..announcements import announce_complete, announce_since_2
from ..fold_state import FoldState, format_producer
from ..limits import KEPT_EXPLORERS, KEPT_REFUSALS, KEPT_UNLISTED, SHORTEST_EXPLORER_LEASE
from ..ordinal_ranges import difference, union
from ..refusals import make_refusal
from ..state import EnginePause, ExplorerState, MonitorState, ProcessLease
from .saves import end_attempt
from .waits import forget_waits


def version_opened(fold: FoldState, event: VersionOpened, envelope: Envelope) -> None:
    """Record the ranks that a version needs parts of, and announce that they publish it."""
    version = fold.ensure_version(event.step)
    if version is not None and not version.ranks:
        # Each rank once: `has_all_parts` compares numbers of ranks and parts.
        version.ranks = tuple(dict.fromkeys(event.ranks))
        version.transport = event.transport
        announce_since_2(
            fold,
            envelope,
            PublicationStarted(
                epoch=fold.state.epoch,
                step=event.step,
                caused_by=fold.entry_id,
                ranks=version.ranks,
                transport=event.transport,
            ),
        )
        announce_complete(fold, event.step, "weights")


def part_published(fold: FoldState, event: VersionPartPublished, envelope: Envelope) -> None:
    """Add a rank's part to its version; announce the part of a ready version as sent again."""
    step = event.step
    if event.save_id is not None:
        end_attempt(fold, event.save_id)
    version = fold.ensure_version(step)
    if version is None:
        return
    kind = fold.state.steps[step].kinds["weights"]
    # Until the version is ready, a retry replaces the part of a failed attempt.
    if kind.outcome is None:
        delta = event.delta
        version.parts[event.rank] = PublishedPart(
            rank=event.rank,
            manifest_digest=event.manifest_digest,
            bytes=event.bytes,
            base=None if delta is None else delta.base,
        )
        if kind.committed_at is not None:  # Most parts come before the commit.
            announce_complete(fold, step, "weights")
    elif kind.outcome == "ready" and version.transport == "collective":
        # No other transport publishes a ready version again: a group keeps none for who joins late.
        resent = VersionResent(epoch=fold.state.epoch, step=step, caused_by=fold.entry_id)
        announce_since_2(fold, envelope, resent)


def weights_applied(fold: FoldState, event: WeightsApplied, envelope: Envelope) -> None:
    """Record the version that an explorer serves."""
    explorer = _explorer(fold, envelope.producer)
    explorer.version = event.version
    explorer.digest = event.digest
    explorer.proof = None if event.proof is None else event.proof.status
    explorer.applied_at = fold.now
    # A newer version answers the request as well.
    if explorer.requested_version is None or event.version >= explorer.requested_version:
        explorer.requested_version = explorer.requested_at = None


def generation_paused(fold: FoldState, event: GenerationPaused, envelope: Envelope) -> None:
    """Record that an explorer's engine stands still for a version."""
    _explorer(fold, envelope.producer).pause = EnginePause(
        since=fold.now,
        incarnation=envelope.producer.incarnation,
        version=event.version,
        mode=event.mode,
        in_flight=event.in_flight,
        lease=event.lease,
    )


def generation_resumed(fold: FoldState, event: GenerationResumed, envelope: Envelope) -> None:
    """Forget the pause of an explorer's engine, and count the requests that it cut short."""
    explorer = _explorer(fold, envelope.producer)
    explorer.pause = None
    explorer.aborted += event.aborted


def version_refused(fold: FoldState, event: VersionRefused, envelope: Envelope) -> None:
    """Count a refused version, and keep it among the last few."""
    state = fold.state
    state.refused += 1
    state.refusals.append(make_refusal(event, envelope.producer, fold.now))
    del state.refusals[:-KEPT_REFUSALS]


def explorer_status_changed(
    fold: FoldState, event: ExplorerStatusChanged, envelope: Envelope
) -> None:
    """Record an explorer's status; one that stopped, or started again, waits no more as it did.

    One that requires a version has lost the one that it served.
    """
    producer = envelope.producer
    explorer = _explorer(fold, producer)
    explorer.status, explorer.endpoint = event.status, event.endpoint
    if event.status == "require_sync":
        explorer.version = explorer.digest = explorer.proof = explorer.applied_at = None
    explorer.lease = _get_lease(explorer, event, producer)
    lives = None if event.status == "stopped" else producer.incarnation
    if explorer.pause is not None and explorer.pause.incarnation != lives:
        explorer.pause = None
    forget_waits(fold, format_producer(producer), but=lives)


def _get_lease(
    explorer: ExplorerState, event: ExplorerStatusChanged, producer: Producer
) -> ProcessLease | None:
    """Return the lease of an explorer after its status; an earlier process has none any more."""
    if event.status == "stopped":
        return None
    if event.lease is not None:
        return ProcessLease(holder=producer, lease=max(event.lease, SHORTEST_EXPLORER_LEASE))
    lease = explorer.lease
    return lease if lease is not None and lease.holder == producer else None


def sync_requested(fold: FoldState, event: SyncRequested, envelope: Envelope) -> None:
    """Record that an explorer asked the trainer to publish."""
    _set_request(fold, envelope.producer, event.oldest_version)


def resend_requested(fold: FoldState, event: ResendRequested, envelope: Envelope) -> None:
    """Record that an explorer asked for a version that it missed."""
    _set_request(fold, envelope.producer, event.version)


def _set_request(fold: FoldState, producer: Producer, version: StepRef | None) -> None:
    explorer = _explorer(fold, producer)
    explorer.requested_version = version
    explorer.requested_at = fold.now


def _explorer(fold: FoldState, producer: Producer) -> ExplorerState:
    """Return an explorer, added if the state has none, and note that it sent an event."""
    explorers = fold.state.explorers
    name = format_producer(producer)
    # Removed and inserted again: the explorer that was silent longest is dropped first.
    explorer = explorers.pop(name, None)
    if explorer is None:
        explorer = ExplorerState()
        _make_room(fold.state, producer.rank)
    explorers[name] = explorer
    explorer.heard_at = fold.now
    # Any event of its process shows that it lives (decision 48).
    if explorer.lease is not None and explorer.is_lost and explorer.lease.holder == producer:
        explorer.lease = structs.replace(explorer.lease, silent_at=None)
    return explorer


def _make_room(state: MonitorState, rank: int) -> None:
    """Drop the oldest explorer if one more would be too many, and record its rank as unlisted."""
    unlisted = difference(state.unlisted_explorers, [(rank, rank)])
    while len(state.explorers) >= KEPT_EXPLORERS:
        oldest = next(iter(state.explorers))
        del state.explorers[oldest]
        # The name is ROLE-RANK, by `format_producer`.
        dropped = int(oldest.rpartition("-")[2])
        unlisted = union(unlisted, [(dropped, dropped)])
    state.unlisted_explorers = unlisted[-KEPT_UNLISTED:]
