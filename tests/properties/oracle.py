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
    epoch, said = 0, []
    for _, envelope in written:
        who = envelope.producer.incarnation
        if envelope.sequence <= seen.get(who, 0):
            continue
        seen[who] = envelope.sequence
        if isinstance(envelope.event, RunOpened | RunResumed):
            if envelope.epoch > epoch:
                epoch, said = envelope.epoch, [envelope.event]
        elif envelope.epoch == epoch:
            said.append(envelope.event)
    return epoch, said


def proven(said: list[Event], step: int, kind: str) -> bool:
    """Whether the kind of the step is complete by what was said."""
    commit = _commit(said, step, kind)
    if kind == "weights":
        return commit is not None and _all_parts(said, step)
    if kind == "checkpoint":
        if commit is None or not _whole(said, step, kind):
            return False
        if not _rests_on_state_dict(said, step):
            return True
        own = _has_own_state_dict(said[commit])
        return _whole(said, step, "state_dict") and (not own or _in_one_folder(said, step))
    if commit is not None:
        return _whole(said, step, kind)
    return _rests_on_state_dict(said, step) and proven(said, step, "checkpoint")


def _commit(said: list[Event], step: int, kind: str) -> int | None:
    """Where the kind was committed first."""
    for number, event in enumerate(said):
        if isinstance(event, StepCommitted) and (event.step, event.kind) == (step, kind):
            return number
    return None


def _rests_on_state_dict(said: list[Event], step: int) -> bool:
    """Whether the step's checkpoint has a state dict: registered by the time of its commit."""
    commit = _commit(said, step, "checkpoint")
    return commit is not None and bool(_registered(said[: commit + 1], step, "state_dict"))


def _has_own_state_dict(commit: StepCommitted) -> bool:
    """Whether the checkpoint's commit says that a state dict is saved with it."""
    return any(
        one.kind == "state_dict" and (one.expected or one.slots) for one in commit.registrations
    )


def _in_one_folder(said: list[Event], step: int) -> bool:
    """Whether a folder with all of the checkpoint's saves has the state dict's, too."""
    state_dict = _folders(said, step, "state_dict")
    folders = _places(_folders(said, step, "checkpoint"))
    return any(one is None or _holds(state_dict, one) for one in folders)


def _registered(said: list[Event], step: int, kind: str) -> dict:
    found = {}
    for event in said:
        if isinstance(event, ThreadCountRegistered) and event.step == step:
            found[event.registration.registration_id, event.registration.kind] = event.registration
        elif isinstance(event, StepCommitted) and event.step == step:
            found.update({(one.registration_id, one.kind): one for one in event.registrations})
    return {key: one for key, one in found.items() if one.kind == kind}


def _whole(said: list[Event], step: int, kind: str) -> bool:
    """Whether all that is expected and all that was begun is saved, and to one folder."""
    registered = _registered(said, step, kind).values()
    folders = _folders(said, step, kind)
    done = {slot for slot, found in folders.items() if found}
    named = {slot for one in registered for slot in one.slots}
    others = sum(one.expected for one in registered if not one.slots)
    return (
        bool(registered)
        and named <= done
        and len(done - named) >= others
        and folders.keys() == done
        and all(len(slots) >= ranks for slots, ranks in _of_ranks(said, step, kind))
        and bool(_places(folders))
    )


def _folders(said: list[Event], step: int, kind: str) -> dict[Slot, set[str]]:
    """Every slot that was spoken of, and the staged folders that it was saved to; empty for none.

    What is outside of staging is the empty folder.
    """
    found: dict[Slot, set[str]] = {}
    for event in said:
        slots: list[Slot] = []
        if isinstance(event, SaveRequested | SaveStarted | SaveFinished | SaveFailed):
            slots = [event.slot]
        elif isinstance(event, LeaseExpired):
            slots = [one.slot for one in event.attempts]
        for slot in slots:
            if (slot.step, slot.kind) == (step, kind):
                folders = found.setdefault(slot, set())
                if isinstance(event, SaveFinished):
                    folders.add("/".join((event.path or "").split("/")[:2]))
    return found


def _of_ranks(said: list[Event], step: int, kind: str) -> list[tuple[set[Slot], int]]:
    """Of saves that say of how many ranks they are one: the slots that are known, and how many."""
    ranks: dict[str, int] = {}
    for event in said:
        if not isinstance(event, SaveRequested | SaveStarted | SaveFinished) or not event.ranks:
            continue
        slot = event.slot
        if (slot.step, slot.kind) == (step, kind):
            ranks[slot.name] = max(event.ranks, ranks.get(slot.name, 0))
    slots = _folders(said, step, kind)
    return [({one for one in slots if one.name == name}, most) for name, most in ranks.items()]


def _holds(folders: dict[Slot, set[str]], folder: str) -> bool:
    return all(found & {folder, ""} for found in folders.values())


def _places(folders: dict[Slot, set[str]]) -> list[str | None]:
    """The folders that hold a finished save of every slot; None where nothing is staged."""
    staged = set().union(*folders.values()) - {""}
    return [one for one in staged if _holds(folders, one)] if staged else [None]


def _all_parts(said: list[Event], step: int) -> bool:
    ranks = next(
        (one.ranks for one in said if isinstance(one, VersionOpened) and one.step == step), ()
    )
    parts = {one.rank for one in said if isinstance(one, VersionPartPublished) and one.step == step}
    return bool(ranks) and set(ranks) <= parts


def complete(written: Entries) -> set[Of]:
    """Every kind of every step that is proven by the whole of the last epoch."""
    epoch, said = what_counts(written)
    subjects = {(one.step, one.kind) for one in said if isinstance(one, StepCommitted)}
    subjects |= {(step, "state_dict") for step, _ in subjects}
    return {(epoch, step, kind) for step, kind in subjects if proven(said, step, kind)}


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
        epoch, said = what_counts(self._written)
        if epoch > self._epoch and said and isinstance(said[0], RunResumed):
            for kind in self.pointers.keys() & {"state_dict", "checkpoint"}:
                self.pointers[kind] = (epoch, said[0].step)
        self._epoch = epoch
        ready = set()
        for one in sorted(complete(self._written) - self._settled):
            self._settled.add(one)
            at, kind = one[:2], one[2]
            # Whatever completes after a later step of its kind is superseded.
            if at >= self.pointers.get(kind, (0, 0)):
                self.pointers[kind] = at
                ready.add(one)
        return ready
