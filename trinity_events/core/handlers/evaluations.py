"""Handlers of events about evaluations: those that are open, and the last results of each set."""

from __future__ import annotations

from itertools import islice

from trinity_schemas import (
    Envelope,
    EvaluationFailed,
    EvaluationFinished,
    EvaluationStarted,
    StepRef,
)

from ..announcements import retire_versions
from ..best_checkpoint import add_score
from ..fold_state import FoldState, trim_oldest
from ..limits import KEPT_EVALUATED, KEPT_RESULTS, KEPT_SETS, LONGEST_REASON
from ..state import EvaluatedSet, Evaluation


def evaluation_started(fold: FoldState, event: EvaluationStarted, _: Envelope) -> None:
    """Hold the version until its evaluation has ended."""
    evaluated = _ensure_set(fold, event.name)
    evaluated.open = _others(evaluated, event.version)
    evaluated.open.append(Evaluation(version=event.version, since=fold.now))
    del evaluated.open[:-KEPT_EVALUATED]


def evaluation_finished(fold: FoldState, event: EvaluationFinished, _: Envelope) -> None:
    """Store the results of a version, which may be retired now."""
    metrics = dict(islice(event.metrics.items(), KEPT_RESULTS))
    ended = Evaluation(version=event.version, since=fold.now, metrics=metrics)
    _record_end(fold, event.name, ended)
    add_score(fold.state, event)


def evaluation_failed(fold: FoldState, event: EvaluationFailed, _: Envelope) -> None:
    """Record that an evaluation was given up; its version may be retired now."""
    reason = event.reason[:LONGEST_REASON]
    ended = Evaluation(version=event.version, since=fold.now, failure=reason)
    _record_end(fold, event.name, ended)


def _record_end(fold: FoldState, name: str, ended: Evaluation) -> None:
    evaluated = _ensure_set(fold, name)
    evaluated.open = _others(evaluated, ended.version)
    evaluated.last = ended
    through = evaluated.through
    evaluated.through = ended.version if through is None else max(through, ended.version)
    retire_versions(fold)


def _others(evaluated: EvaluatedSet, version: StepRef) -> list[Evaluation]:
    """Return the open evaluations of other versions."""
    return [evaluation for evaluation in evaluated.open if evaluation.version != version]


def _ensure_set(fold: FoldState, name: str) -> EvaluatedSet:
    """Return the evaluations of a set, added if the state has none."""
    sets = fold.state.evaluations
    if name not in sets:
        sets[name] = EvaluatedSet()
        trim_oldest(sets, KEPT_SETS)
    return sets[name]
