"""Rules of completeness: saves and parts that a kind of a step needs, and lacks (invariant 2)."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from trinity_schemas import Kind, SaveProof, Slot

from .state import KindState, SlotState, StepState


def has_all_parts(step: StepState) -> bool:
    """Return True if a step's weights are committed, and every rank's part is published."""
    version = step.version
    return (
        step.kinds["weights"].committed_at is not None
        and version is not None
        # The numbers first: each part asks, and comparing the sets each time would cost N * N.
        and 0 < len(version.ranks) <= len(version.parts)
        and version.parts.keys() >= set(version.ranks)
    )


class Completion(Struct, frozen=True):
    """Proof that a kind of files of a step is complete."""

    folder: str | None
    """Staged folder that holds every save; None for saves outside of staging."""
    proofs: tuple[SaveProof, ...]
    """Proofs of the finished slots, and of those of the state dict that the kind rests on."""
    count: int
    """Number of these slots, also of a state dict that is compacted and has no proofs any more."""


def find_completion(step: StepState, kind: Kind) -> Completion | None:
    """Return the proof that a kind of files is complete; None while it is not.

    The folder of the newest saves comes first. Of a slot that was saved to several folders, the
    attempt in the chosen one counts.
    """
    places = _complete_places(step, kind)
    if not places:
        return None
    place, states = places[0], [step.kinds[kind]]
    if states[0].with_state_dict:
        states.append(step.kinds["state_dict"])
        # A checkpoint may have no saves of its own (zero is registered): then this folder is the
        # step's.
        if place is None and not states[0].slots:
            place = states[1].folder or None
    proofs = [_find_proof(slot, place) for state in states for slot in _finished(state)]
    count = sum(state.finished for state in states)
    return Completion(
        folder=place, proofs=tuple(proof for proof in proofs if proof is not None), count=count
    )


StagedPlace = str | None
"""A staged folder, or None for saves that named no path below the staging folder."""


def _complete_places(step: StepState, kind: Kind) -> list[StagedPlace]:
    """Return the places that hold every save of a kind of files; none while it is incomplete.

    A step that is saved again is saved to another folder, and one folder must hold every save. A
    checkpoint whose commit registers a state dict needs the state dict in its own folder, even if
    the step has another one elsewhere.
    """
    state = step.kinds[kind]
    if kind != "state_dict":
        return _checkpoint_places(step, state)
    if state.committed_at is not None:
        return _saved_places(state)
    # A complete checkpoint makes its state dict ready too, for they may share a folder.
    checkpoint = step.kinds.get("checkpoint")
    if checkpoint is None or not checkpoint.with_state_dict:
        return []
    places = _checkpoint_places(step, checkpoint)
    return places if checkpoint.own_state_dict else places and _places(state)


def _checkpoint_places(step: StepState, state: KindState) -> list[StagedPlace]:
    places = _saved_places(state) if state.committed_at is not None else []
    if places and state.with_state_dict:
        state_dict = step.kinds["state_dict"]
        if not _saved_places(state_dict):
            return []
        if state.own_state_dict:
            return [place for place in places if not _count_unsaved(state_dict, place)]
    return places


def _saved_places(kind: KindState) -> list[StagedPlace]:
    return _places(kind) if _all_saved(kind) else []


def _places(kind: KindState) -> list[StagedPlace]:
    """Return the places that hold all finished saves of a kind, the place of the newest first."""
    slots = [slot for slot in kind.slots.values() if slot.proof is not None]
    # A save outside of staging has an empty folder, and goes with any other.
    newest = {slot.folder for slot in slots} - {""}
    # If the newest saves are in several folders, none of these folders has all of them.
    places: list[StagedPlace] = [] if len(newest) > 1 else [next(iter(newest), None)]
    if any(slot.others for slot in slots):
        every = set[str]().union(*(slot.folders for slot in slots)) - {"", *places}
        # Sorted: sets of strings differ in order between processes, and replays must agree.
        places += [folder for folder in sorted(every) if not _count_unsaved(kind, folder)]
    return places


def _count_unsaved(kind: KindState, place: StagedPlace) -> int:
    """Count the slots that have no finished attempt in a place, nor one outside of staging."""
    if place is None:
        return 0
    slots = kind.slots.values()
    return sum(slot.proof is None or not slot.folders & {place, ""} for slot in slots)


def _find_proof(slot: SlotState, place: StagedPlace) -> SaveProof | None:
    """Return the proof of a slot's finished attempt in a place, or else of its newest."""
    folder = place or ""
    return slot.proof if folder == slot.folder else slot.others.get(folder, slot.proof)


def _finished(kind: KindState) -> list[SlotState]:
    return [slot for _, slot in sorted(kind.slots.items()) if slot.proof is not None]


def _all_saved(kind: KindState) -> bool:
    """Return True if every expected slot and every slot that was begun has a finished attempt."""
    if kind.compacted:
        return True
    if not kind.registrations or kind.finished < len(kind.slots):
        return False
    unnamed = most_named = 0
    # Every finished save asks this. The search begins at the last registration and ends at the
    # first missing slot, so that a step's cost is linear in its saves.
    for registration in reversed(kind.registrations.values()):
        slots = registration.slots
        if slots:
            # Registrations may name the same slots, so only the largest of them is certain.
            most_named = max(most_named, len(slots))
        else:
            unnamed += registration.expected
        if kind.finished < unnamed + most_named or (slots and not _are_saved(kind, slots)):
            return False
    if kind.ranks and kind.finished < sum(kind.ranks.values()):
        return False
    return not ((most_named or kind.ranks) and _lacking(kind)[0])


def _are_saved(kind: KindState, slots: tuple[Slot, ...]) -> bool:
    return all(
        (state := kind.slots.get(slot_key(slot))) is not None and state.proof is not None
        for slot in reversed(slots)
    )


def slot_key(slot: Slot) -> str:
    """Return the name of a slot within its kind of its step."""
    return f"{slot.role}.{slot.rank}.{slot.name}"


def rank_group(slot: Slot) -> str:
    """Return the name that the saves of all ranks share within their kind of their step."""
    return f"{slot.role}/{slot.name}"


def count_registered(kind: KindState) -> int:
    """Count the saves that a kind's registrations expect."""
    named, unnamed = _registered_slots(kind)
    return len(named) + unnamed


def _registered_slots(kind: KindState) -> tuple[dict[str, Slot], int]:
    """Return the slots that registrations name, and the number of slots that they only count."""
    named: dict[str, Slot] = {}
    unnamed = 0
    for registration in kind.registrations.values():
        if registration.slots:
            named.update((slot_key(slot), slot) for slot in registration.slots)
        else:
            unnamed += registration.expected
    return named, unnamed


def _lacking(kind: KindState) -> tuple[int, int, list[Slot]]:
    """Return the number of missing slots, the number of expected slots, and the silent slots.

    A missing slot has no finished attempt. A slot is expected if a registration counts it, if it
    is one rank's share of a save of many ranks, or if it was begun. A silent slot is expected by
    name and has no event yet.
    """
    if kind.compacted:
        return 0, kind.finished, []
    named, unnamed = _registered_slots(kind)
    silent = [slot for key, slot in named.items() if key not in kind.slots]
    more = 0
    for group, ranks in kind.ranks.items():
        members = [slot.slot for slot in kind.slots.values() if rank_group(slot.slot) == group]
        members += [slot for slot in silent if rank_group(slot) == group]
        numbers = {slot.rank for slot in members}
        if max(numbers) < ranks:
            silent += [replace(members[0], rank=n) for n in range(ranks) if n not in numbers]
        else:  # Ranks are not numbered from zero: only the number of silent slots is known.
            more += max(0, ranks - len(numbers))
    # Registrations and ranks may mean the same slots: the larger number counts, not the sum.
    expected = max(len(kind.slots) + len(silent) + more, len(named) + unnamed)
    return expected - kind.finished, expected, silent


def format_missing(step: StepState, kind: Kind, now: int, named: int | None = None) -> list[str]:
    """Return in words the commit, saves and parts that a kind waits for.

    Ages are counted to ``now``, in milliseconds. At most ``named`` saves or parts are listed; None
    lists all.
    """
    state = step.kinds[kind]
    phrases = [] if state.committed_at is not None else ["the trainer's commit"]
    if kind == "weights":
        return phrases + _format_missing_parts(step, named)
    phrases += _format_missing_saves(state, now, named)
    if kind == "checkpoint" and state.with_state_dict:
        phrases += _format_missing_state_dict(state, step.kinds["state_dict"])
    return phrases


def missing_processes(step: StepState, kind: Kind, publisher: str) -> list[str]:
    """Return the processes, by role and rank, whose saves or parts a kind waits for.

    It is the trainer if only its commit or its registration is missing. ``publisher`` is the role
    of the ranks that publish weights.
    """
    state, processes = step.kinds[kind], list[str]()
    if kind == "weights":
        version = step.version
        if version is not None:
            ranks = [rank for rank in version.ranks if rank not in version.parts]
            processes = [f"{publisher}-{rank}" for rank in ranks]
    else:
        unsaved = [slot.slot for slot in state.slots.values() if slot.proof is None]
        unsaved += _lacking(state)[2]
        if kind == "checkpoint" and state.with_state_dict:
            processes = missing_processes(step, "state_dict", publisher)
        processes = [*(f"{slot.role}-{slot.rank}" for slot in unsaved), *processes]
    if not processes and (
        state.committed_at is None or not (kind == "weights" or state.registrations)
    ):
        return ["trainer-0"]
    return list(dict.fromkeys(processes))


def _format_missing_state_dict(checkpoint: KindState, state_dict: KindState) -> list[str]:
    lacking, expected, _ = _lacking(state_dict)
    place = None
    if checkpoint.own_state_dict:
        # The first finished save of the checkpoint determines the folder of its state dict.
        place = next(iter(_places(checkpoint)), None)
    if place is not None:
        lacking = expected - len(state_dict.slots) + _count_unsaved(state_dict, place)
    where = "" if place is None else f" in {place}"
    return [f"{lacking} of {expected} saves of its state dict{where}"] if lacking else []


def _format_missing_parts(step: StepState, named: int | None) -> list[str]:
    version = step.version
    if version is None or not version.ranks:
        return ["its version to be opened"]
    lacking = [str(rank) for rank in version.ranks if rank not in version.parts]
    return [f"the part of rank {', '.join(_limit_names(lacking, named))}"] if lacking else []


def _limit_names(names: list[str], most: int | None) -> list[str]:
    more = [] if most is None or len(names) <= most else [f"and {len(names) - most} more"]
    return names[:most] + more


def _format_missing_saves(state: KindState, now: int, named: int | None) -> list[str]:
    seen = [
        f"{slot.slot.name} of {slot.slot.role}-{slot.slot.rank} ({_format_attempts(slot, now)})"
        for slot in state.slots.values()
        if slot.proof is None
    ]
    if not state.registrations:
        return ["a registration of how many saves to expect", *_limit_names(seen, named)]
    lacking, expected, silent = _lacking(state)
    if not lacking:
        if _places(state):
            return []
        folders = sorted(set.union(*(slot.folders for slot in state.slots.values())) - {""})
        return [f"one folder with all of its saves, not {', '.join(folders)}"]
    unseen = [f"{slot.name} of {slot.role}-{slot.rank} (not started)" for slot in silent]
    names = "; ".join(_limit_names(seen + unseen, named)) or "no save is under way"
    return [f"{lacking} of {expected} saves: {names}"]


def _format_attempts(slot: SlotState, now: int) -> str:
    """Return in words how far the slot's attempts have come."""
    if slot.running:
        save_id, since = min(slot.running.items(), key=lambda attempt: attempt[1])
        written = slot.progress.get(save_id)
        so_far = "" if written is None else f", {written:,} bytes so far"
        return f"started {(now - since) / 1000:.1f} s ago{so_far}"
    if slot.waiting:
        return f"waiting for its turn for {(now - min(slot.waiting.values())) / 1000:.1f} s"
    return "failed" if slot.failed else "not started"
