"""Why a step is not ready, in words."""

from __future__ import annotations

from trinity_schemas import Kind

from .fold import is_complete, slot_key
from .state import KindState, MonitorState, StepState


def explain(state: MonitorState, step: int) -> str:
    """One sentence for each kind of the step: what it has, and who is missing since when.

    Ages are counted to the last entry of the log, in seconds of the server's clock.
    """
    found = state.steps.get(step)
    if found is None:
        if step <= state.forgotten_through:
            return f"Step {step} was settled and its details are no longer kept."
        return f"Nothing is known of step {step} in epoch {state.epoch} of run {state.run_id}."
    now = int(state.position.partition("-")[0])
    return " ".join(_explain_kind(step, found, kind, now) for kind in found.kinds)


def _explain_kind(step: int, found: StepState, kind: Kind, now: int) -> str:
    state = found.kinds[kind]
    subject = f"Step {step} {kind}"
    if state.outcome is not None:
        return f"{subject} is {state.outcome}."
    wanting: list[str] = []
    if state.committed_at is None:
        wanting.append("the trainer's commit")
    if kind == "weights":
        wanting += _missing_parts(found)
    else:
        wanting += _missing_saves(state, now)
        if kind == "checkpoint" and not is_complete(found, "state_dict"):
            wanting.append("the saves of its state dict" if "state_dict" in found.kinds else "")
    failed = f"; failed so far: {state.failure}" if state.failure else ""
    return f"{subject} waits for {', '.join(filter(None, wanting)) or 'nothing'}{failed}."


def _missing_parts(found: StepState) -> list[str]:
    version = found.version
    if version is None or not version.ranks:
        return ["its version to be opened"]
    missing = [str(rank) for rank in version.ranks if rank not in version.parts]
    return [f"the part of rank {', '.join(missing)}"] if missing else []


def _missing_saves(state: KindState, now: int) -> list[str]:
    if not state.registrations:
        return ["a registration of how many saves to expect"]
    expected = sum(registration.expected for registration in state.registrations.values())
    done = sum(slot.proof is not None for slot in state.slots.values())
    if done >= expected:
        return []
    named = {slot_key(slot): slot for reg in state.registrations.values() for slot in reg.slots}
    running = [
        f"{slot.slot.name} of {slot.slot.role}-{slot.slot.rank} "
        f"(started {(now - min(slot.running.values())) / 1000:.1f} s ago)"
        for slot in state.slots.values()
        if slot.proof is None and slot.running
    ]
    silent = [
        f"{slot.name} of {slot.role}-{slot.rank} (not started)"
        for key, slot in named.items()
        if key not in state.slots
    ]
    who = "; ".join(running + silent) or "no save is under way"
    return [f"{expected - done} of {expected} saves: {who}"]
