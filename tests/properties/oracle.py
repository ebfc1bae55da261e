"""What invariant 2 says is ready, worked out anew from all that was said, however slowly."""

from __future__ import annotations

from tests.properties.generated import Entries
from trinity_schemas import (
    Event,
    LeaseExpired,
    RunOpened,
    RunResumed,
    SaveFailed,
    SaveFinished,
    SaveRequested,
    SaveStarted,
    Slot,
    StepCommitted,
    ThreadCountRegistered,
    VersionOpened,
    VersionPartPublished,
)

Of = tuple[int, int, str]
"""An epoch, a step of it, and a kind."""


def what_counts(written: Entries) -> tuple[int, list[Event]]:
    """The last epoch, and what was said in it: by nobody twice, by nobody of another epoch."""
    seen: dict[str, int] = {}
    epoch, events = 0, []
    for _, envelope in written:
        who = envelope.producer.incarnation
        if envelope.sequence <= seen.get(who, 0):
            continue
        seen[who] = envelope.sequence
        if isinstance(envelope.event, RunOpened | RunResumed):
            if envelope.epoch > epoch:
                epoch, events = envelope.epoch, [envelope.event]
        elif envelope.epoch == epoch:
            events.append(envelope.event)
    return epoch, events


def proven(events: list[Event], step: int, kind: str) -> bool:
    """Whether the kind of the step is complete by what was said."""
    commit = _commit(events, step, kind)
    if kind == "weights":
        return commit is not None and _all_parts(events, step)
    if kind == "checkpoint":
        if commit is None or not _whole(events, step, kind):
            return False
        if not _rests_on_state_dict(events, step):
            return True
        own = _has_own_state_dict(events[commit])
        return _whole(events, step, "state_dict") and (not own or _in_one_folder(events, step))
    if commit is not None:
        return _whole(events, step, kind)
    return _rests_on_state_dict(events, step) and proven(events, step, "checkpoint")


def _commit(events: list[Event], step: int, kind: str) -> int | None:
    """Where the kind was committed first."""
    for number, event in enumerate(events):
        if isinstance(event, StepCommitted) and (event.step, event.kind) == (step, kind):
            return number
    return None


def _rests_on_state_dict(events: list[Event], step: int) -> bool:
    """Whether the step's checkpoint has a state dict: registered by the time of its commit."""
    commit = _commit(events, step, "checkpoint")
    return commit is not None and bool(_registered(events[: commit + 1], step, "state_dict"))


def _has_own_state_dict(commit: StepCommitted) -> bool:
    """Whether the checkpoint's commit says that a state dict is saved with it."""
    return any(
        registration.kind == "state_dict" and (registration.expected or registration.slots)
        for registration in commit.registrations
    )


def _in_one_folder(events: list[Event], step: int) -> bool:
    """Whether a folder with all of the checkpoint's saves has the state dict's, too."""
    state_dict = _folders(events, step, "state_dict")
    folders = _places(_folders(events, step, "checkpoint"))
    return any(folder is None or _holds(state_dict, folder) for folder in folders)


def _registered(events: list[Event], step: int, kind: str) -> dict:
    registrations = {}
    for event in events:
        if isinstance(event, ThreadCountRegistered) and event.step == step:
            registrations[event.registration.registration_id, event.registration.kind] = (
                event.registration
            )
        elif isinstance(event, StepCommitted) and event.step == step:
            registrations.update(
                {
                    (registration.registration_id, registration.kind): registration
                    for registration in event.registrations
                }
            )
    return {
        key: registration
        for key, registration in registrations.items()
        if registration.kind == kind
    }


def _whole(events: list[Event], step: int, kind: str) -> bool:
    """Whether all that is expected and all that was begun is saved, and to one folder."""
    registered = _registered(events, step, kind).values()
    folders = _folders(events, step, kind)
    done = {slot for slot, places in folders.items() if places}
    named = {slot for registration in registered for slot in registration.slots}
    others = sum(registration.expected for registration in registered if not registration.slots)
    return (
        bool(registered)
        and named <= done
        and len(done - named) >= others
        and folders.keys() == done
        and all(len(slots) >= ranks for slots, ranks in _find_rank_saves(events, step, kind))
        and bool(_places(folders))
    )


def _folders(events: list[Event], step: int, kind: str) -> dict[Slot, set[str]]:
    """Every slot that was spoken of, and the staged folders that it was saved to; empty for none.

    What is outside of staging is the empty folder.
    """
    places: dict[Slot, set[str]] = {}
    for event in events:
        slots: list[Slot] = []
        if isinstance(event, SaveRequested | SaveStarted | SaveFinished | SaveFailed):
            slots = [event.slot]
        elif isinstance(event, LeaseExpired):
            slots = [attempt.slot for attempt in event.attempts]
        for slot in slots:
            if (slot.step, slot.kind) == (step, kind):
                folders = places.setdefault(slot, set())
                if isinstance(event, SaveFinished):
                    folders.add("/".join((event.path or "").split("/")[:2]))
    return places


def _find_rank_saves(events: list[Event], step: int, kind: str) -> list[tuple[set[Slot], int]]:
    """Of saves that say of how many ranks they are one: the slots that are known, and how many."""
    ranks: dict[str, int] = {}
    for event in events:
        if not isinstance(event, SaveRequested | SaveStarted | SaveFinished) or not event.ranks:
            continue
        slot = event.slot
        if (slot.step, slot.kind) == (step, kind):
            ranks[slot.name] = max(event.ranks, ranks.get(slot.name, 0))
    slots = _folders(events, step, kind)
    return [({slot for slot in slots if slot.name == name}, most) for name, most in ranks.items()]


def _holds(folders: dict[Slot, set[str]], folder: str) -> bool:
    return all(places & {folder, ""} for places in folders.values())


def _places(folders: dict[Slot, set[str]]) -> list[str | None]:
    """The folders that hold a finished save of every slot; None where nothing is staged."""
    staged = set().union(*folders.values()) - {""}
    return [folder for folder in staged if _holds(folders, folder)] if staged else [None]


def _all_parts(events: list[Event], step: int) -> bool:
    ranks = next(
        (
            event.ranks
            for event in events
            if isinstance(event, VersionOpened) and event.step == step
        ),
        (),
    )
    parts = {
        event.rank
        for event in events
        if isinstance(event, VersionPartPublished) and event.step == step
    }
    return bool(ranks) and set(ranks) <= parts


def complete(written: Entries) -> set[Of]:
    """Every kind of every step that is proven by the whole of the last epoch."""
    epoch, events = what_counts(written)
    subjects = {(event.step, event.kind) for event in events if isinstance(event, StepCommitted)}
    subjects |= {(step, "state_dict") for step, _ in subjects}
    return {(epoch, step, kind) for step, kind in subjects if proven(events, step, kind)}


class Oracle:
    """Told the log entry by entry, says what must be announced ready, and where pointers stand."""

    def __init__(self) -> None:
        self._written: Entries = []
        self._epoch = 0
        self._settled: set[Of] = set()
        self.pointers: dict[str, tuple[int, int]] = {}

    def feed(self, entry) -> set[Of]:
        """The kinds that this entry makes ready."""
        self._written.append(entry)
        epoch, events = what_counts(self._written)
        if epoch > self._epoch and events and isinstance(events[0], RunResumed):
            for kind in self.pointers.keys() & {"state_dict", "checkpoint"}:
                self.pointers[kind] = (epoch, events[0].step)
        self._epoch = epoch
        ready = set()
        for completed in sorted(complete(self._written) - self._settled):
            self._settled.add(completed)
            at, kind = completed[:2], completed[2]
            # Whatever completes after a later step of its kind is superseded.
            if at >= self.pointers.get(kind, (0, 0)):
                self.pointers[kind] = at
                ready.add(completed)
        return ready
