"""Evaluations of a run: which are open, and which versions of the lineage have had theirs."""

from __future__ import annotations

from collections.abc import Iterator

from trinity_schemas import StepRef

from .lineage import is_in_lineage
from .state import Evaluation, MonitorState


def open_versions(state: MonitorState) -> set[StepRef]:
    """Return the weight versions that open evaluations name."""
    return {evaluation.version for _, evaluation in open_evaluations(state)}


def open_evaluations(state: MonitorState) -> Iterator[tuple[str, Evaluation]]:
    """Yield the open evaluations, each with the name of its set."""
    for name, evaluated in state.evaluations.items():
        for evaluation in evaluated.open:
            yield name, evaluation


def evaluated_through(state: MonitorState) -> dict[str, StepRef]:
    """Return the newest standing version of each set whose evaluation has ended."""
    return {
        name: evaluated.through
        for name, evaluated in state.evaluations.items()
        if evaluated.through is not None
    }


def continue_evaluations(state: MonitorState) -> None:
    """Forget open evaluations of the epoch before, and results of versions that do not stand.

    Evaluations end in the order of their versions. So all versions up to the checkpoint that the
    epoch resumes from have had theirs, if that of a later version has ended.
    """
    if not state.lineage:
        state.evaluations = {}
        return
    resumed = state.lineage[-1]
    for evaluated in state.evaluations.values():
        evaluated.open = []
        through = evaluated.through
        if through is not None and (through > resumed or not is_in_lineage(state, through)):
            evaluated.through = resumed
