"""Why a step is not ready, in words."""

from __future__ import annotations

from trinity_schemas import Kind, StepRef

from .complete import missing
from .known import words_of
from .refusals import words_of_refusal
from .state import KindState, MonitorState

_NAMED = 8
"""Ranks and saves that are named; of more, the number is told."""


def explain(
    state: MonitorState, step: int, *, now: int | None = None, named: int | None = _NAMED
) -> str:
    """One sentence for each kind of the step: what it has, and who is missing since when.

    Args:
        state: The run's state.
        step: The training step.
        now: Milliseconds of the server's clock to which ages are counted; by default those of
            the last entry of the log.
        named: How many of those that are missing are named; None names all.
    """
    said = _explained(state, step, now, named)
    refused = [
        words_of_refusal(one) for one in state.refusals if one.version == StepRef(state.epoch, step)
    ]
    more = f"{len(refused) - _NAMED} more refusals came before." if len(refused) > _NAMED else ""
    return " ".join([said, *refused[-_NAMED:], *([more] if more else [])])


def _explained(state: MonitorState, step: int, now: int | None, named: int | None) -> str:
    found = state.steps.get(step)
    if found is None:
        if step <= state.forgotten_through:
            return f"Step {step} was settled and its details are no longer kept."
        return f"Nothing is known of step {step} in epoch {state.epoch} of run {state.run_id}."
    last = int(state.position.partition("-")[0])
    at = last if now is None else max(now, last)
    return " ".join(_explain_kind(state, step, kind, at, named) for kind in found.kinds)


def _explain_kind(state: MonitorState, step: int, kind: Kind, now: int, named: int | None) -> str:
    found = state.steps[step]
    kind_state = found.kinds[kind]
    subject = f"Step {step} {kind}"
    if kind_state.outcome is not None:
        return f"{subject} is {kind_state.outcome}."
    wanting = ", ".join(missing(found, kind, now, named)) or "nothing"
    # What failed says so in a sentence of its own, which often ends as this one does.
    failed = f"; failed so far: {kind_state.failure.rstrip('.')}" if kind_state.failure else ""
    since = kind_state.committed_at
    age = "" if since is None else f"; committed {(now - since) / 1000:.1f} s ago"
    at_it = _at_it(state, step, now) if kind == "weights" else _turn(state, kind_state)
    return f"{subject} waits for {wanting}{age}{at_it}{failed}."


def _at_it(state: MonitorState, step: int, now: int) -> str:
    """Which ranks publish their parts of the version."""
    since = {
        attempt.slot.rank: attempt.since
        for attempt in state.attempts.values()
        if attempt.slot.kind == "weights" and attempt.slot.step == step
    }
    if not since:
        return ""
    ranks = ", ".join(map(str, sorted(since)[:_NAMED]))
    more = f" and {len(since) - _NAMED} more" if len(since) > _NAMED else ""
    return f"; rank {ranks}{more} at it for {(now - min(since.values())) / 1000:.1f} s"


def _turn(state: MonitorState, kind: KindState) -> str:
    """Who has the turn that its saves wait for."""
    if not any(slot.waiting for slot in kind.slots.values()) or not state.turns:
        return ""
    having = [
        words_of(attempt.slot)
        for save_id in list(state.turns)[:3]
        if (attempt := state.attempts.get(save_id)) is not None
    ]
    more = f" and {len(state.turns) - 3} more" if len(state.turns) > 3 else ""
    return f"; the turn is with {'; '.join(having)}{more}"
