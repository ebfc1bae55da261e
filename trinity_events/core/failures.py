"""Failures of a run, with those of one cause told together."""

from __future__ import annotations

import re
from typing import NamedTuple

from trinity_schemas import Kind

from .state import KINDS, MonitorState

_OF_ONE_ATTEMPT = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
"""Parts of a reason that differ although the cause is the same: paths, numbers."""
_LISTED = 3
"""Steps that are listed before the last one; of more, the number is told."""


class Failure(NamedTuple):
    """One cause, and every step that failed of it."""

    kinds: tuple[Kind, ...]
    steps: tuple[int, ...]
    reason: str
    """Reason of the last step, as it was announced."""

    @property
    def sentence(self) -> str:
        """The failure in words: what failed, at which steps, and why."""
        kinds = " and ".join(self.kinds)
        if len(self.steps) == 1:
            return f"Step {self.steps[0]} {kinds} FAILED: {self.reason.rstrip('.')}."
        return f"Steps {_listed(self.steps)}: {kinds} FAILED; the last: {self.reason.rstrip('.')}."


def failures(state: MonitorState) -> list[Failure]:
    """Return the failures that no retry has overcome, oldest first, one for each cause.

    The kinds of one step that failed of one cause are told together, and so are the steps whose
    kinds failed of the same one.
    """
    grouped: dict[tuple[tuple[Kind, ...], str], list[tuple[int, str]]] = {}
    for step, found in sorted(state.steps.items()):
        of_step: dict[str, list[Kind]] = {}
        for kind in KINDS:
            one = found.kinds.get(kind)
            if one is not None and one.is_failed and one.failure is not None:
                of_step.setdefault(one.failure, []).append(kind)
        for reason, kinds in of_step.items():
            grouped.setdefault((tuple(kinds), same_cause(reason)), []).append((step, reason))
    return [
        Failure(kinds, tuple(step for step, _ in told), told[-1][1])
        for (kinds, _), told in grouped.items()
    ]


def same_cause(reason: str) -> str:
    """Return what two reasons of one cause have in common: the reason without its particulars."""
    _, failed, cause = reason.partition(" failed: ")
    return _OF_ONE_ATTEMPT.sub("*", cause if failed else reason)


def _listed(steps: tuple[int, ...]) -> str:
    if len(steps) <= _LISTED + 1:
        return ", ".join(map(str, steps))
    first = ", ".join(map(str, steps[:_LISTED]))
    return f"{first}, ..., {steps[-1]} ({len(steps)} of them)"
