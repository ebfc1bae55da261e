"""The part of the fold that hears of weight versions, and of those who make and use them."""

from __future__ import annotations

from trinity_schemas import (
    ConsumerDetached,
    Envelope,
    ExplorerStatusChanged,
    Producer,
    PublishedPart,
    SyncRequested,
    TrainerStatusChanged,
    VersionOpened,
    VersionPartPublished,
    VersionRefused,
    WeightsApplied,
)

from .fold_state import describe_producer, keep_last
from .limits import KEPT_DETACHED, KEPT_EXPLORERS, KEPT_REFUSALS
from .refusals import refusal_of
from .saves import SaveFold
from .state import DetachedConsumer, ExplorerState, TrainerWaits


class VersionFold(SaveFold):
    """What is said of weights, and of everyone's status."""

    def _version_opened(self, event: VersionOpened, _: Envelope) -> None:
        version = self._version(event.step)
        if version is not None and not version.ranks:
            version.ranks = tuple(dict.fromkeys(event.ranks))
            version.transport = event.transport
            self._settle(event.step, "weights")

    def _part_published(self, event: VersionPartPublished, _: Envelope) -> None:
        step = event.step
        if event.save_id is not None:
            self._end_attempt(event.save_id)
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

    def _refused(self, event: VersionRefused, envelope: Envelope) -> None:
        state = self.state
        state.refused += 1
        state.refusals.append(refusal_of(event, envelope.producer, self._now))
        del state.refusals[:-KEPT_REFUSALS]

    # --- status ----------------------------------------------------------------------------

    def _trainer_status(self, event: TrainerStatusChanged, _: Envelope) -> None:
        self.state.trainer = event.status
        self.state.trainer_step = max(self.state.trainer_step, event.step)
        wait = event.waits_for
        self.state.trainer_waits = None
        if wait is not None:
            self.state.trainer_waits = TrainerWaits(
                what=wait.what,
                step=wait.step,
                have=wait.have,
                expected=wait.expected,
                missing=wait.missing[:KEPT_EXPLORERS],
                since=self._now - int(min(wait.seconds * 1000, self._now)),
            )

    def _explorer_status(self, event: ExplorerStatusChanged, envelope: Envelope) -> None:
        self._explorer(envelope.producer).status = event.status

    def _sync_requested(self, event: SyncRequested, envelope: Envelope) -> None:
        explorer = self._explorer(envelope.producer)
        explorer.wanted = event.wanted
        explorer.requested_at = self._now

    def _explorer(self, producer: Producer) -> ExplorerState:
        explorers = self.state.explorers
        who = describe_producer(producer)
        # Taken out and put back: whoever was silent longest goes first.
        found = explorers.pop(who, None) or ExplorerState()
        explorers[who] = found
        found.heard_at = self._now
        keep_last(explorers, KEPT_EXPLORERS)
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
            oldest_pending=event.oldest_pending,
        )
        keep_last(detached, KEPT_DETACHED)
