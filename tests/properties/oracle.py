"""What invariant 2 says is ready, worked out anew from all that was said, however slowly."""

from __future__ import annotations

from tests.properties.generated import Entries
from trinity_schemas import (
    Event,
    RunOpened,
    RunResumed,
    SaveFinished,
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
        rests_on = _rests_on_state_dict(said, step)
        return (
            commit is not None
            and _all_saved(said, step, kind)
            and (not rests_on or _all_saved(said, step, "state_dict"))
        )
    by_itself = commit is not None and _all_saved(said, step, kind)
    with_checkpoint = _rests_on_state_dict(said, step) and proven(said, step, "checkpoint")
    return by_itself or with_checkpoint


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


def _registered(said: list[Event], step: int, kind: str) -> dict:
    found = {}
    for event in said:
        if isinstance(event, ThreadCountRegistered) and event.step == step:
            found[event.registration.registration_id, event.registration.kind] = event.registration
        elif isinstance(event, StepCommitted) and event.step == step:
            found.update({(one.registration_id, one.kind): one for one in event.registrations})
    return {key: one for key, one in found.items() if one.kind == kind}


def _all_saved(said: list[Event], step: int, kind: str) -> bool:
    registered = _registered(said, step, kind).values()
    done = {
        event.slot
        for event in said
        if isinstance(event, SaveFinished) and (event.slot.step, event.slot.kind) == (step, kind)
    }
    named = {slot for one in registered for slot in one.slots}
    others = sum(one.expected for one in registered if not one.slots)
    return bool(registered) and named <= done and len(done - named) >= others


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
