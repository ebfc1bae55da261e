"""Why a step is not ready, in words."""

from __future__ import annotations

from trinity_schemas import Kind

from .complete import missing
from .state import MonitorState, StepState


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
    wanting = ", ".join(missing(found, kind, now)) or "nothing"
    failed = f"; failed so far: {state.failure}" if state.failure else ""
    return f"{subject} waits for {wanting}{failed}."
