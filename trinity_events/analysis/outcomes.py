"""Outcomes of a step, read from its announcements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from trinity_schemas import (
    ContractError,
    Envelope,
    Kind,
    StepFailed,
    StepReady,
    StepSuperseded,
)

from ..core.state import KINDS, KindState, MonitorState

OutcomeName = Literal["waiting", "ready", "superseded", "failed"]


class Outcome(Struct, frozen=True, kw_only=True):
    """Last announcement of a kind of a step."""

    epoch: int
    kind: Kind
    outcome: OutcomeName
    entry_id: str
    detail: str = ""

    @classmethod
    def from_announcement(
        cls, entry_id: str, envelope: Envelope | ContractError, step: int
    ) -> Outcome | None:
        """Return the outcome that an announcement tells of a step, or None."""
        event = envelope.event if isinstance(envelope, Envelope) else None
        outcome: OutcomeName = "ready"
        detail = ""
        match event:
            case StepReady():
                pass
            case StepFailed():
                outcome, detail = "failed", event.reason.rstrip(".")
            case StepSuperseded():
                outcome, detail = "superseded", f"by step {event.by.step}"
            case _:
                return None
        if event.step != step:
            return None
        return cls(
            epoch=event.epoch, kind=event.kind, outcome=outcome, entry_id=entry_id, detail=detail
        )


def get_outcome(kind: KindState) -> OutcomeName:
    """Return the outcome of a kind of a step in the state."""
    return kind.outcome or ("failed" if kind.failure else "waiting")


def format_outcomes(step: int, outcomes: Sequence[Outcome]) -> list[str]:
    """Return one line for each kind: the newest epoch first, and its failures first."""
    # The epoch is named only where it tells two lines apart.
    several = len({outcome.epoch for outcome in outcomes}) > 1
    ordered = sorted(
        outcomes,
        key=lambda outcome: (
            -outcome.epoch,
            # False sorts before True: failures come first.
            outcome.outcome != "failed",
            KINDS.index(outcome.kind),
        ),
    )
    return [_format_outcome(step, outcome, several=several) for outcome in ordered]


def _format_outcome(step: int, outcome: Outcome, *, several: bool) -> str:
    epoch = f" of epoch {outcome.epoch}" if several else ""
    subject = f"Step {step}{epoch} {outcome.kind}"
    at = f"(announcement {outcome.entry_id})"
    if outcome.outcome == "failed":
        return f"{subject} FAILED: {outcome.detail} {at}."
    detail = f" {outcome.detail}" if outcome.detail else ""
    return f"{subject} was {outcome.outcome}{detail} {at}."


def format_end(state: MonitorState, step: int) -> list[str]:
    """Return the line that a run failed or was interrupted in a step; none for other steps."""
    if state.closed in (None, "finished") or step != _last_step(state):
        return []
    how = "FAILED" if state.closed == "failed" else f"was {state.closed}"
    why = f": {state.closed_error.rstrip('.')}" if state.closed_error else ""
    return [f"Run {state.run_id} {how} in this step{why}."]


def _last_step(state: MonitorState) -> int:
    """Return the step under way at the end: the trainer's, or the next if that is settled."""
    last = state.steps.get(state.trainer_step)
    # A step that is settled is over: what failed is the one after it.
    settled = last is not None and all(kind.outcome for kind in last.kinds.values())
    return state.trainer_step + 1 if settled else state.trainer_step
