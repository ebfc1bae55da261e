"""Lineage of a run: the epochs that its current epoch continues, each with its steps that count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from trinity_schemas import RunOpened, RunResumed, StepRef

from .limits import KEPT_LINEAGE
from .state import MonitorState


class EpochSpan(NamedTuple):
    """Epoch of a lineage, with its first and last step that count; the current one has no last."""

    epoch: int
    first: int
    last: int | None


def lineage_spans(state: MonitorState) -> list[EpochSpan]:
    """Return the epochs of the current lineage, oldest first; the last one is the current one."""
    firsts = [0, *(epoch_end.step for epoch_end in state.lineage)]
    spans = [
        EpochSpan(epoch_end.epoch, first, epoch_end.step)
        # There is one more first step than ends: that of the current epoch.
        for epoch_end, first in zip(state.lineage, firsts, strict=False)
    ]
    return [*spans, EpochSpan(state.epoch, firsts[-1], None)]


def is_in_lineage(state: MonitorState, version: StepRef) -> bool:
    """Return True if the lineage holds a version: a discarded epoch's is of another model.

    A resumed epoch publishes the weights of its checkpoint as its own first version.
    """
    return any(
        span.epoch == version.epoch
        and span.first <= version.step
        and (span.last is None or version.step <= span.last)
        for span in lineage_spans(state)
    )


def covers(epoch: int, lineage: Iterable[StepRef], at: StepRef) -> bool:
    """Return True if a step is of an epoch, or of what the epoch's lineage continues."""
    return at.epoch == epoch or any(
        earlier.epoch == at.epoch and at.step <= earlier.step for earlier in lineage
    )


def continued_lineage(state: MonitorState, opening: RunOpened | RunResumed) -> list[StepRef]:
    """Return the earlier epochs that a new epoch continues, each with its last step that counts.

    An opening that does not resume continues none. A resume that names no checkpoint continues
    the newest epoch that has the step.
    """
    if isinstance(opening, RunOpened) or not state.epoch:
        return []
    # The resume discards epochs that began after its step.
    spans = [span for span in lineage_spans(state) if span.first <= opening.step]
    checkpoint = opening.checkpoint or StepRef(spans[-1].epoch, opening.step)
    continued = [
        StepRef(span.epoch, min(span.last, checkpoint.step))
        for span in spans
        if span.last is not None and span.epoch < checkpoint.epoch
    ]
    return [*continued, checkpoint][-KEPT_LINEAGE:]
