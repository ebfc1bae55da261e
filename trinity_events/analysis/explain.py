"""Explanations, in words, of a step that is not ready."""

from __future__ import annotations

from trinity_schemas import Kind, StepRef

from ..core.completeness import format_missing
from ..core.fold_state import format_slot
from ..core.pauses import format_pause, open_pauses
from ..core.refusals import format_refusal
from ..core.skipped_updates import find_skipped_updates
from ..core.state import KINDS, KindState, MonitorState, StepState

_NAMED = 8
"""Ranks and saves that a line names; the others are counted."""


def explain(
    state: MonitorState, step: int, *, now: int | None = None, named: int | None = _NAMED
) -> str:
    """Return one line for each kind of a step, the cause first: its outcome, and what it lacks.

    Args:
        state: The run's state.
        step: The training step.
        now: Milliseconds of the server's clock to which ages are counted; by default the time
            of the last entry of the log. Ages stop when the run is closed.
        named: Number of missing saves or parts that are named; None names all.
    """
    explanation = _explained(state, step, now, named)
    refused = [
        format_refusal(refusal)
        for refusal in state.refusals
        if refusal.version == StepRef(state.epoch, step)
    ]
    more = f"{len(refused) - _NAMED} more refusals came before." if len(refused) > _NAMED else ""
    skipped = [
        f"The trainer, in {anomaly.detail}." for anomaly in find_skipped_updates(state, step)
    ]
    paused = [
        format_pause(paused, _until(state, now))
        for paused in open_pauses(state)
        if paused.pause.version == StepRef(state.epoch, step)
    ]
    return "\n".join(
        [explanation, *paused[:_NAMED], *refused[-_NAMED:], *([more] if more else []), *skipped]
    )


def _explained(state: MonitorState, step: int, now: int | None, named: int | None) -> str:
    step_state = state.steps.get(step)
    if step_state is None:
        # Compacted: the state is bounded, and knows of old steps only that they are settled.
        if step <= state.forgotten_through:
            return f"Step {step} was settled and its details are no longer kept."
        return f"Nothing is known of step {step} in epoch {state.epoch} of run {state.run_id}."
    kinds = sorted(step_state.kinds, key=lambda kind: (_blame(step_state, kind), KINDS.index(kind)))
    return "\n".join(_explain_kind(state, step, kind, _until(state, now), named) for kind in kinds)


def format_profiles(state: MonitorState, step: int) -> list[str]:
    """Return one line for each rank that wrote a profile of the step."""
    return [
        f"{profile.by} profiled step {step}: {profile.path} (open it at https://ui.perfetto.dev)."
        for profile in state.profiles
        if profile.step == step
    ]


def format_unfinished(state: MonitorState, *, now: int | None = None) -> list[str]:
    """Return one line for each kind of a step that is neither ready nor failed, as `explain`."""
    at = _until(state, now)
    return [
        _explain_kind(state, step, kind, at, _NAMED)
        for step, step_state in sorted(state.steps.items())
        for kind in KINDS
        if kind in step_state.kinds and not step_state.kinds[kind].settled
    ]


def _until(state: MonitorState, now: int | None) -> int:
    """Return the milliseconds to which ages are counted: the end of the run, or ``now``."""
    # Ages stop with the run: what was missing then is not missing longer and longer.
    if state.closed_at is not None:
        return state.closed_at
    # At least the last entry: the clock of the question may be behind the server's.
    last = int(state.position.partition("-")[0])
    return last if now is None else max(now, last)


def _blame(step: StepState, kind: Kind) -> int:
    """Return the order in which kinds are told: lower is nearer to the cause."""
    kind_state = step.kinds[kind]
    if kind_state.is_failed:
        # A checkpoint that failed with its state dict is a consequence, and comes after it.
        return 1 if _follows(step, kind) else 0
    return 3 if kind_state.outcome is not None else 2


def _follows(step: StepState, kind: Kind) -> bool:
    """Return True if the kind failed because the state dict that it rests on failed."""
    state_dict = step.kinds.get("state_dict")
    return (
        kind == "checkpoint"
        and state_dict is not None
        and state_dict.failure == step.kinds[kind].failure
    )


def _newer(state: MonitorState, step: int, kind: Kind) -> str:
    """Return the newer step that is ready, for a kind that it superseded."""
    pointer = state.ready.get(kind)
    if state.steps[step].kinds[kind].outcome != "superseded" or pointer is None:
        return ""
    return f": step {pointer.at.step} of epoch {pointer.at.epoch} is ready"


def _explain_kind(state: MonitorState, step: int, kind: Kind, now: int, named: int | None) -> str:
    step_state = state.steps[step]
    kind_state = step_state.kinds[kind]
    subject = f"Step {step} {kind}"
    if kind_state.outcome is not None:
        return f"{subject} is {kind_state.outcome}{_newer(state, step, kind)}."
    if kind_state.failure is not None and _follows(step_state, kind):
        return f"{subject} FAILED with its state_dict."
    wanting = ", ".join(format_missing(step_state, kind, now, named)) or "nothing"
    since = kind_state.committed_at
    closed = state.closed is not None
    seconds = "" if since is None else f"{(now - since) / 1000:.1f} s"
    age = "" if since is None else f"; committed {seconds} {'before' if closed else 'ago'}"
    at_it = _at_it(state, step, now) if kind == "weights" else _turn(state, kind_state)
    lacks = f"{wanting}{age}{at_it}."
    if kind_state.failure is not None:
        # The reason is a sentence of its own, which often ends with a full stop.
        retry = "it lacked" if closed else "a retry still needs"
        return f"{subject} FAILED: {kind_state.failure.rstrip('.')}; {retry} {lacks}"
    if closed:
        return f"{subject} was not complete when the run ended: it lacked {lacks}"
    return f"{subject} waits for {lacks}"


def _at_it(state: MonitorState, step: int, now: int) -> str:
    """Name the ranks that publish their parts of the version, in words."""
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
    """Name the saves that have the turn that a kind's saves wait for, in words."""
    if not any(slot.waiting for slot in kind.slots.values()) or not state.turns:
        return ""
    having = [
        format_slot(attempt.slot)
        for save_id in list(state.turns)[:3]
        if (attempt := state.attempts.get(save_id)) is not None
    ]
    more = f" and {len(state.turns) - 3} more" if len(state.turns) > 3 else ""
    return f"; the turn is with {'; '.join(having)}{more}"
