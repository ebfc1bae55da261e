"""Properties of a log that hold for one sync style, and that every other style violates.

They read raw envelopes, in the order of the log, and know nothing of the trainer's code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from trinity_events.core.file_versions import WEIGHTS_SAVE, weights_save
from trinity_schemas import (
    Envelope,
    RolloutsDispatched,
    SaveStarted,
    StepReady,
    StepRef,
    StepTrained,
    SyncRequested,
    VersionOpened,
    WeightsApplied,
)


def every_request_names_one_version_which_serves_it(log: Sequence[Envelope]) -> bool:
    """Return True if each request is exact, and each sample is as stale as its request says."""
    named: dict[int, StepRef] = {}
    for event in _events(log):
        if isinstance(event, RolloutsDispatched):
            if not event.exact:
                return False
            named |= dict.fromkeys(_ordinals(event.ordinals), event.oldest)
            named |= {reissued.ordinal: event.oldest for reissued in event.reissued}
        elif isinstance(event, StepTrained):
            late = Counter(
                event.step - 1 - named[ordinal].step for ordinal in _ordinals(event.trained)
            )
            samples = sum(event.staleness.values()) // max(late.total(), 1)
            if event.staleness != {steps: number * samples for steps, number in late.items()}:
                return False
    return bool(named)


def versions_are_promised_before_they_are_ready(log: Sequence[Envelope]) -> bool:
    """Return True if requests name versions to come, and the trainer publishes unasked."""
    if _requests_versions(log) or _exact(log):
        return False
    return all(not ready for ready in _ready_when_first_named(log).values())


def versions_are_published_because_an_explorer_asked(log: Sequence[Envelope]) -> bool:
    """Return True if each version, but the first and the last step's, follows its own request."""
    published: list[int] = []
    requested = -1
    unasked = []
    for event in _events(log):
        if isinstance(event, SyncRequested) and event.oldest_version is not None:
            requested = max(requested, event.oldest_version.step)
        elif (step := _begun_version(event)) is not None and step not in published:
            if published and not published[-1] < requested <= step:
                unasked.append(step)
            published.append(step)
    last = max(event.step for event in _events(log) if isinstance(event, StepTrained))
    return len(published) > 2 and set(unasked) <= {last}


def requests_name_versions_that_are_ready(log: Sequence[Envelope]) -> bool:
    """Return True if no explorer waits for the trainer, and the trainer publishes unasked."""
    if _requests_versions(log) or _exact(log):
        return False
    return all(_ready_when_first_named(log).values())


PROPERTIES: dict[str, Callable[[Sequence[Envelope]], bool]] = {
    "fixed": every_request_names_one_version_which_serves_it,
    "trainer_driven": versions_are_promised_before_they_are_ready,
    "explorer_driven": versions_are_published_because_an_explorer_asked,
    "fully_async": requests_name_versions_that_are_ready,
}


def stalest(log: Sequence[Envelope]) -> int:
    """Return the greatest staleness of a sample that was trained on."""
    staleness = [event.staleness for event in _events(log) if isinstance(event, StepTrained)]
    return max(steps for counts in staleness for steps in counts)


def reissued(log: Sequence[Envelope]) -> Counter[str]:
    """Return the number of prompts that were issued again, by reason."""
    return Counter(
        request.reason
        for event in _events(log)
        if isinstance(event, RolloutsDispatched)
        for request in event.reissued
    )


def is_version(event: StepReady) -> bool:
    """Return True if a version is ready, in memory or as files."""
    return event.kind == "weights" or weights_save(event) is not None


def announced_digest(event: StepReady) -> str | None:
    """Return the digest of the version that is ready, in memory or as files; None of all else."""
    if event.kind == "weights":
        return event.version_digest
    saved = weights_save(event)
    return None if saved is None else saved.digest


def served_versions(log: Sequence[Envelope]) -> dict[str, list[WeightsApplied]]:
    """Return the versions that each explorer applied, in order, by its name."""
    applied: dict[str, list[WeightsApplied]] = {}
    for envelope in log:
        if isinstance(envelope.event, WeightsApplied):
            applied.setdefault(f"explorer-{envelope.producer.rank}", []).append(envelope.event)
    return applied


def serving_faults(log: Sequence[Envelope]) -> list[str]:
    """Return the versions that an explorer served with other bytes than those announced."""
    announced = {
        StepRef(event.epoch, event.step): digest
        for event in _events(log)
        if isinstance(event, StepReady) and (digest := announced_digest(event)) is not None
    }
    return [
        f"{name} served other bytes of step {application.version.step}"
        for name, applied in served_versions(log).items()
        for application in applied
        if announced.get(application.version) != application.digest
    ]


def _begun_version(event: object) -> int | None:
    """Return the step of the version whose publication or save begins with an event."""
    if isinstance(event, VersionOpened):
        return event.step
    if isinstance(event, SaveStarted) and event.slot.name == WEIGHTS_SAVE:
        return event.slot.step
    return None


def _events(log: Sequence[Envelope]) -> Iterable[object]:
    return (envelope.event for envelope in log)


def _ordinals(ranges: Iterable[tuple[int, int]]) -> list[int]:
    return [ordinal for first, last in ranges for ordinal in range(first, last + 1)]


def _requests_versions(log: Sequence[Envelope]) -> bool:
    return any(isinstance(event, SyncRequested) for event in _events(log))


def _exact(log: Sequence[Envelope]) -> bool:
    return any(isinstance(event, RolloutsDispatched) and event.exact for event in _events(log))


def _ready_when_first_named(log: Sequence[Envelope]) -> dict[int, bool]:
    """Return for each version that a first request names whether it was ready by then."""
    ready: set[int] = set()
    was_ready: dict[int, bool] = {}
    for event in _events(log):
        if isinstance(event, StepReady) and is_version(event):
            ready.add(event.step)
        elif isinstance(event, RolloutsDispatched) and event.ordinals and event.oldest is not None:
            was_ready.setdefault(event.oldest.step, event.oldest.step in ready)
    return was_ready
