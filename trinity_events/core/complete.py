"""What a kind of a step needs to be ready, and what it still lacks (invariant 2)."""

from __future__ import annotations

from trinity_schemas import Kind, Slot

from .state import KindState, SlotState, StepState

STAGING = ".staging"
"""Folder of a run's checkpoint directory in which saves are written until they are ready."""


def is_complete(step: StepState, kind: Kind) -> bool:
    """Whether a kind of a step is proven complete (invariant 2)."""
    state = step.kinds.get(kind)
    if state is None:
        return False
    if kind == "weights":
        version = step.version
        return (
            state.committed_at is not None
            and version is not None
            and 0 < len(version.ranks) <= len(version.parts)
            and version.parts.keys() >= set(version.ranks)
        )
    if kind == "state_dict":
        # A checkpoint makes it ready too, but not before itself: they may share a folder.
        if state.committed_at is not None:
            return _all_saved(state)
        checkpoint = step.kinds.get("checkpoint")
        return (
            checkpoint is not None
            and checkpoint.with_state_dict
            and is_complete(step, "checkpoint")
        )
    if state.committed_at is None or not _all_saved(state):
        return False
    return not state.with_state_dict or _all_saved(step.kinds["state_dict"])


def _all_saved(kind: KindState) -> bool:
    """Every expected slot has a finished attempt; an explicit zero needs none."""
    if kind.compacted:
        return True
    if not kind.registrations:
        return False
    unnamed = most_named = 0
    # Asked at every save that finishes: to look no further than to the first that lacks, from the
    # last that were registered on, is what keeps a step's cost linear in its saves.
    for registration in reversed(kind.registrations.values()):
        slots = registration.slots
        if slots:
            most_named = max(most_named, len(slots))
        else:
            unnamed += registration.expected
        if kind.finished < unnamed + most_named or (slots and not _are_saved(kind, slots)):
            return False
    if most_named and _lacking(kind)[0]:
        return False
    # A step that is saved again is saved to another folder: one of them must hold all.
    return len(_staged_folders(kind)) <= 1


def _are_saved(kind: KindState, slots: tuple[Slot, ...]) -> bool:
    return all(
        (found := kind.slots.get(slot_key(slot))) is not None and found.proof is not None
        for slot in reversed(slots)
    )


def _staged_folders(kind: KindState) -> set[str]:
    found = {staged_in(slot.path) for slot in kind.slots.values() if slot.proof is not None}
    return {folder for folder in found if folder is not None}


def staged_in(path: str | None) -> str | None:
    """The folder below :data:`STAGING` that a path lies in, if any."""
    parts = path.split("/") if path else []
    staged = len(parts) > 1 and parts[0] == STAGING and parts[1] not in ("", ".", "..")
    return "/".join(parts[:2]) if staged else None


def slot_key(slot: Slot) -> str:
    """A slot's name within its kind of its step."""
    return f"{slot.role}.{slot.rank}.{slot.name}"


def _lacking(kind: KindState) -> tuple[int, int, list[Slot]]:
    """Of the expected slots: how many lack a finished attempt, how many there are, who is silent.

    Silent are those that a registration names and nobody has spoken of.
    """
    named: dict[str, Slot] = {}
    unnamed = 0
    for registration in kind.registrations.values():
        if registration.slots:
            named.update((slot_key(slot), slot) for slot in registration.slots)
        else:
            unnamed += registration.expected
    finished = {key for key, slot in kind.slots.items() if slot.proof is not None}
    others = len(finished - named.keys())
    lacking = len(named.keys() - finished) + max(0, unnamed - others)
    silent = [slot for key, slot in named.items() if key not in kind.slots]
    return lacking, len(named) + unnamed, silent


def missing(step: StepState, kind: Kind, now: int, named: int | None = None) -> list[str]:
    """What the kind waits for, in words; ages are counted to ``now``, in milliseconds.

    Of the saves or parts that it lacks so many are ``named``, or all.
    """
    state = step.kinds[kind]
    found = [] if state.committed_at is not None else ["the trainer's commit"]
    if kind == "weights":
        return found + _missing_parts(step, named)
    found += _missing_saves(state, now, named)
    if kind == "checkpoint" and state.with_state_dict:
        lacking, expected, _ = _lacking(step.kinds["state_dict"])
        if lacking:
            found.append(f"{lacking} of {expected} saves of its state dict")
    return found


def _missing_parts(step: StepState, named: int | None) -> list[str]:
    version = step.version
    if version is None or not version.ranks:
        return ["its version to be opened"]
    lacking = [str(rank) for rank in version.ranks if rank not in version.parts]
    return [f"the part of rank {', '.join(_first(lacking, named))}"] if lacking else []


def _first(names: list[str], most: int | None) -> list[str]:
    more = [] if most is None or len(names) <= most else [f"and {len(names) - most} more"]
    return names[:most] + more


def _missing_saves(state: KindState, now: int, named: int | None) -> list[str]:
    seen = [
        f"{slot.slot.name} of {slot.slot.role}-{slot.slot.rank} ({_standing(slot, now)})"
        for slot in state.slots.values()
        if slot.proof is None
    ]
    if not state.registrations:
        return ["a registration of how many saves to expect", *_first(seen, named)]
    lacking, expected, silent = _lacking(state)
    if not lacking:
        folders = sorted(_staged_folders(state))
        return (
            [f"one folder with all of its saves, not {', '.join(folders)}"] if folders[1:] else []
        )
    unseen = [f"{slot.name} of {slot.role}-{slot.rank} (not started)" for slot in silent]
    names = "; ".join(_first(seen + unseen, named)) or "no save is under way"
    return [f"{lacking} of {expected} saves: {names}"]


def _standing(slot: SlotState, now: int) -> str:
    """How far the slot's attempts have come, in words."""
    if slot.running:
        save_id, since = min(slot.running.items(), key=lambda one: one[1])
        written = slot.progress.get(save_id)
        so_far = "" if written is None else f", {written:,} bytes so far"
        return f"started {(now - since) / 1000:.1f} s ago{so_far}"
    if slot.waiting:
        return f"waiting for its turn for {(now - min(slot.waiting.values())) / 1000:.1f} s"
    return "failed" if slot.failed else "not started"
