"""Figures of a run, computed from its log alone."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

from msgspec import Struct, field

from trinity_schemas import (
    Envelope,
    RolloutsDispatched,
    RunResumed,
    SaveStarted,
    Slot,
    StepCommitted,
    StepFailed,
    StepReady,
    StepRef,
    StepTrained,
    TrainerStatusChanged,
    VersionOpened,
    VersionPartPublished,
    VersionRefused,
    WeightsApplied,
)

from ..core.file_versions import WEIGHTS_SAVE, weights_save
from ..core.limits import KEPT_REFUSALS
from ..core.ordinal_ranges import count
from ..core.refusals import make_refusal, suspects
from ..core.reward_errors import REWARD_ERRORS
from ..core.state import Refusal
from .transfers import FirstApplications


class Spread(Struct, frozen=True, kw_only=True):
    """Median, 99th percentile and maximum of durations in seconds; zeros without any."""

    median: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of the values, by the nearest rank."""
        if not values:
            return cls()
        ordered = sorted(values)

        def rank(share: float) -> float:
            return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

        return cls(median=rank(0.5), p99=rank(0.99), max=ordered[-1], count=len(ordered))


class RunSummary(Struct, frozen=True, kw_only=True):
    """Figures of a run; durations are in seconds."""

    run_id: str
    steps: int
    versions_published: int
    versions_applied: int
    """Versions that at least one explorer applied."""
    versions_superseded_unpulled: int
    """Ready versions that no explorer applied or refused, before a version that was applied."""
    versions_unaccounted: int
    """Ready versions that no explorer applied or refused, after the last that was applied."""
    versions_refused: int = 0
    """Ready versions that an explorer refused and no explorer applied."""
    refusals: int = 0
    """Number of refusals, also of versions that another explorer applied."""
    suspects: tuple[str, ...] = ()
    """Sentences about hosts that repeated refusals point to."""
    versions_delta: int
    """Ready versions of which some rank published a delta; the others are full."""
    bytes_published: int
    bytes_saved: int
    """Bytes that deltas saved: the size of all ready versions in full, less ``bytes_published``."""
    checkpoints_ready: int
    failures: int
    staleness: dict[int, int] = {}
    """Staleness in optimizer steps to the number of samples that were trained on."""
    reissued: dict[str, int] = {}
    """Reasons to issue prompts again to the number of times."""
    dropped: dict[str, int] = {}
    """Reasons to drop prompts to their number."""
    reward_errors: int = 0
    """Samples that were trained on with a score, since their reward failed."""
    stall: Spread
    """Time that a publication holds the training loop, on its slowest rank."""
    transfer: Spread
    """Time from a version's opening to its last byte verified, for each explorer."""
    pause: Spread
    """Time that an installation holds an explorer's engine."""
    events: int
    events_per_step: float
    event_bytes_per_step: float


class _Version(Struct):
    opened: float = 0.0
    stall: float = 0.0
    ready: bool = False
    applied: bool = False
    refused: bool = False
    saved: int = 0
    """Bytes of a version that is files."""
    parts: dict[int, VersionPartPublished] = field(default_factory=dict)

    @property
    def is_delta(self) -> bool:
        return any(part.delta for part in self.parts.values())

    @property
    def bytes(self) -> int:
        return self.saved + sum(part.bytes for part in self.parts.values())

    @property
    def whole(self) -> int:
        return self.saved + sum(
            part.delta.whole if part.delta else part.bytes for part in self.parts.values()
        )


class Summarizer:
    """Counter of a run's events and announcements, which may come in any interleaving."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self._versions: dict[StepRef, _Version] = {}
        self._saving: dict[StepRef, float] = {}
        """Versions in files that are being saved, to the Unix seconds at which they began."""
        self._first_applications = FirstApplications()
        self._transfers: list[float] = []
        self._pauses: list[float] = []
        self._first_steps: dict[int, int] = {}
        self._last_steps: dict[int, int] = {}
        self._refusals: deque[Refusal] = deque(maxlen=KEPT_REFUSALS)
        self._refused = 0
        self._staleness: Counter[int] = Counter()
        self._reissued: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._reward_errors = 0
        self._checkpoints = self._failures = self._events = self._bytes = 0

    def add(self, envelope: Envelope, nbytes: int) -> None:
        """Count one entry of ``nbytes`` bytes on the wire."""
        event = envelope.event
        # Before the match: entries that no figure is made of count as well.
        self._events += 1
        self._bytes += nbytes
        match event:
            case StepCommitted(step=step) | TrainerStatusChanged(step=step):
                self._reached(envelope.epoch, step)
            case StepTrained() | RolloutsDispatched():
                self._count_rollouts(envelope.epoch, event)
            case RunResumed(step=step):
                self._first_steps[envelope.epoch] = step
            case VersionOpened(step=step):
                self._version(envelope.epoch, step).opened = envelope.occurred_at
            case VersionPartPublished(step=step, seconds=seconds):
                version = self._version(envelope.epoch, step)
                # Ranks publish side by side: the loop is held for as long as the slowest one.
                version.stall = max(version.stall, seconds)
                version.parts[event.rank] = event
            case WeightsApplied(version=ref):
                version = self._version(ref.epoch, ref.step)
                version.applied = True
                # Without its opening, which may be of a trimmed part of the log, there is no
                # transfer time.
                if self._first_applications.add(envelope, event) and version.opened:
                    # The clocks of two hosts: the difference may be negative.
                    self._transfers.append(max(0.0, event.verified_at - version.opened))
                # Every application, also a repeated one, holds the engine.
                self._pauses.append(event.phases.pause)
            case VersionRefused(version=ref):
                self._version(ref.epoch, ref.step).refused = True
                at = int(envelope.occurred_at * 1000)
                self._refusals.append(make_refusal(event, envelope.producer, at))
                self._refused += 1
            case StepReady(kind="weights", epoch=epoch, step=step):
                self._version(epoch, step).ready = True
            case StepReady(kind="checkpoint"):
                self._checkpoints += 1
            case StepFailed():
                self._failures += 1
            case _:
                pass
        self._add_file_version(envelope)

    def _add_file_version(self, envelope: Envelope) -> None:
        """Count an entry about a version that is files."""
        match event := envelope.event:
            case SaveStarted(slot=Slot(name=name, step=step)) if name == WEIGHTS_SAVE:
                self._version(envelope.epoch, step).opened = envelope.occurred_at
                self._saving[StepRef(envelope.epoch, step)] = envelope.occurred_at
            case StepCommitted(step=step, kind="state_dict"):
                # Files hold the loop from the start of their save to the commit.
                began = self._saving.pop(StepRef(envelope.epoch, step), None)
                if began is not None:
                    version = self._version(envelope.epoch, step)
                    version.stall = max(0.0, envelope.occurred_at - began)
            case StepReady(epoch=epoch, step=step):
                if (saved := weights_save(event)) is not None:
                    version = self._version(epoch, step)
                    version.ready, version.saved = True, saved.bytes
            case _:
                pass

    def _count_rollouts(self, epoch: int, event: StepTrained | RolloutsDispatched) -> None:
        if isinstance(event, StepTrained):
            self._reached(epoch, event.step)
            self._staleness.update(event.staleness)
            errors = event.metrics.get(REWARD_ERRORS, 0)
            # Metrics come from outside: NaN is no number of errors.
            self._reward_errors += int(errors) if math.isfinite(errors) else 0
        else:
            self._reissued.update(reissue.reason for reissue in event.reissued)
        for reason, ordinals in event.dropped.items():
            self._dropped[reason] += count(ordinals)

    def summary(self) -> RunSummary:
        """Return the figures so far."""
        ready = {ref: version for ref, version in self._versions.items() if version.ready}
        applied = [ref for ref, version in ready.items() if version.applied]
        newest = max(applied, default=StepRef(0, 0))
        refused = [ref for ref, version in ready.items() if version.refused and not version.applied]
        unapplied = [
            ref for ref, version in ready.items() if not (version.applied or version.refused)
        ]
        # Older than what was applied: explorers take the newest, and may pass over those between.
        superseded = sum(ref < newest for ref in unapplied)
        # A resumed epoch begins at its checkpoint's step, and has trained only those after it.
        steps = sum(
            last - self._first_steps.get(epoch, 0) for epoch, last in self._last_steps.items()
        )
        return RunSummary(
            run_id=self.run_id,
            steps=steps,
            versions_published=len(ready),
            versions_applied=len(applied),
            versions_superseded_unpulled=superseded,
            versions_unaccounted=len(unapplied) - superseded,
            versions_refused=len(refused),
            refusals=self._refused,
            suspects=tuple(suspects(list(self._refusals))),
            versions_delta=sum(version.is_delta for version in ready.values()),
            bytes_published=sum(version.bytes for version in ready.values()),
            bytes_saved=sum(version.whole - version.bytes for version in ready.values()),
            checkpoints_ready=self._checkpoints,
            failures=self._failures,
            staleness=dict(sorted(self._staleness.items())),
            reissued=dict(sorted(self._reissued.items())),
            dropped=dict(sorted(self._dropped.items())),
            reward_errors=self._reward_errors,
            stall=Spread.of([version.stall for version in ready.values()]),
            transfer=Spread.of(self._transfers),
            pause=Spread.of(self._pauses),
            events=self._events,
            events_per_step=self._events / max(steps, 1),
            event_bytes_per_step=self._bytes / max(steps, 1),
        )

    def _reached(self, epoch: int, step: int) -> None:
        self._last_steps[epoch] = max(step, self._last_steps.get(epoch, 0))

    def _version(self, epoch: int, step: int) -> _Version:
        return self._versions.setdefault(StepRef(epoch, step), _Version())
