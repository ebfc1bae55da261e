"""Removal of details of settled steps, so that the state stays small."""

from __future__ import annotations

from trinity_schemas import StepRef

from .limits import KEPT_STEPS, KEPT_STEPS_AT_MOST
from .state import MonitorState


def compact_step(state: MonitorState, step: int) -> None:
    """Drop a step's registrations and slots, if a newer step of each of its kinds is ready.

    The outcome, the number of saves and the folder of each kind stay.
    """
    step_state = state.steps.get(step)
    if step_state is None:
        return
    at = StepRef(state.epoch, step)
    for name, kind in step_state.kinds.items():
        pointer = state.ready.get(name)
        # All kinds or none: an open checkpoint may rest on the slots of its state dict (decision
        # 12).
        if kind.outcome is None or pointer is None or pointer.at <= at:
            return
    for kind in step_state.kinds.values():
        if not kind.compacted:
            # None from here on, as recorded states have it (decision 45).
            kind.folder = kind.folder or None
            kind.compacted = True
            kind.registrations, kind.slots, kind.ranks = {}, {}, {}
    step_state.version = None


def drop_oldest_steps(state: MonitorState) -> None:
    """Drop the oldest steps beyond :data:`KEPT_STEPS`, up to the first that is not over."""
    steps = state.steps
    while len(steps) > KEPT_STEPS:
        # The first key is the lowest step: `FoldState.ensure_step` keeps them in order.
        oldest = next(iter(steps))
        # An open step may still become ready. Beyond the upper limit the bound of the state goes
        # first.
        if len(steps) <= KEPT_STEPS_AT_MOST and not _is_over(state, oldest):
            return
        del steps[oldest]
        # A late event of the step must not open it again, or it would be announced a second time.
        state.forgotten_through = max(state.forgotten_through, oldest)


def _is_over(state: MonitorState, step: int) -> bool:
    """Return True if each kind of a step is settled, or a step that is as new is ready."""
    at = StepRef(state.epoch, step)
    for kind, kind_state in state.steps[step].kinds.items():
        pointer = state.ready.get(kind)
        if not kind_state.settled and (pointer is None or pointer.at < at):
            return False
    return True
