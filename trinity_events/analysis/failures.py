"""Failures of a run, grouped by cause."""

from __future__ import annotations

import re
from typing import NamedTuple

from trinity_schemas import Kind

from ..core.state import KINDS, MonitorState

_OF_ONE_ATTEMPT = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
"""Parts of a reason that differ between failures of one cause: paths and numbers."""
_LISTED = 3
"""Steps that a sentence lists before the last one; the others are counted."""


class Failure(NamedTuple):
    """Failures of one cause, with their steps."""

    kinds: tuple[Kind, ...]
    steps: tuple[int, ...]
    reason: str
    """Reason of the last step's failure, as it was announced."""

    @property
    def sentence(self) -> str:
        """Return the kinds, the steps and the reason in words."""
        kinds = " and ".join(self.kinds)
        if len(self.steps) == 1:
            return f"Step {self.steps[0]} {kinds} FAILED: {self.reason.rstrip('.')}."
        return f"Steps {_listed(self.steps)}: {kinds} FAILED; the last: {self.reason.rstrip('.')}."


def failures(state: MonitorState) -> list[Failure]:
    """Return the failures that no retry has overcome, oldest first, one for each cause.

    Kinds of one step that failed of one cause are grouped first, then steps whose kinds failed of
    the same cause.
    """
    grouped: dict[tuple[tuple[Kind, ...], str], list[tuple[int, str]]] = {}
    for step, step_state in sorted(state.steps.items()):
        of_step: dict[str, list[Kind]] = {}
        for kind in KINDS:
            kind_state = step_state.kinds.get(kind)
            if kind_state is not None and kind_state.is_failed and kind_state.failure is not None:
                of_step.setdefault(kind_state.failure, []).append(kind)
        # By step first: a state dict that fails takes its checkpoint with it, by one cause.
        for reason, kinds in of_step.items():
            grouped.setdefault((tuple(kinds), same_cause(reason)), []).append((step, reason))
    return [
        Failure(kinds, tuple(step for step, _ in failed_steps), failed_steps[-1][1])
        for (kinds, _), failed_steps in grouped.items()
    ]


def same_cause(reason: str) -> str:
    """Return a reason without its slot, paths and numbers; it is equal for one cause."""
    # Before it stands the slot, which names one rank.
    _, failed, cause = reason.partition(" failed: ")
    return _OF_ONE_ATTEMPT.sub("*", cause if failed else reason)


def _listed(steps: tuple[int, ...]) -> str:
    if len(steps) <= _LISTED + 1:
        return ", ".join(map(str, steps))
    first = ", ".join(map(str, steps[:_LISTED]))
    return f"{first}, ..., {steps[-1]} ({len(steps)} of them)"
