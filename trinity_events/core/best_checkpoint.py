"""Best checkpoint of a run: that of the step whose weights had the best evaluation.

1. A score belongs to the step of the version that gave the answers, and to no other.
2. The best checkpoint is complete: a better score counts once the checkpoint of its step is.
3. Scores of a lineage that a resume discarded do not count: their checkpoints are of other weights.
"""

from __future__ import annotations

import math

from trinity_schemas import EvaluationFinished

from .lineage import is_in_lineage
from .state import BestScores, MonitorState, ScoredStep

_KEPT_SCORES = 64
"""Newest scores. Those without a checkpoint wait for it, which is seconds away or never comes."""


def best_checkpoint(state: MonitorState) -> ScoredStep | None:
    """Return the best checkpoint that is complete; None without one."""
    if (best := state.best) is None:
        return None
    complete = [score for score in best.scores if score.is_complete]
    # Of equal ones the first: the later steps have gained nothing.
    return max(complete, key=lambda score: (_rank(best, score.value), -score.at.step), default=None)


def add_score(state: MonitorState, event: EvaluationFinished) -> None:
    """Record the result of an evaluation by which the run chooses its best checkpoint."""
    if (chosen := event.best_by) is None:
        return
    value = event.metrics.get(chosen.metric)
    if value is None or not math.isfinite(value):
        return
    best = state.best
    by = event.name, chosen.metric, chosen.mode
    if best is None or (best.name, best.metric, best.mode) != by:
        # Scores of another metric cannot be compared with these.
        best = state.best = BestScores(name=event.name, metric=chosen.metric, mode=chosen.mode)
    step = event.version.step
    is_complete = step in state.complete_checkpoints
    # A resumed epoch evaluates the step that it resumes from again: its last result counts.
    best.scores = [score for score in best.scores if score.at.step != step]
    best.scores.append(ScoredStep(at=event.version, value=value, is_complete=is_complete))
    _forget_oldest(state)


def complete_score(state: MonitorState, step: int) -> None:
    """Note that the checkpoint of a step is complete."""
    if state.best is None:
        return
    for score in state.best.scores:
        score.is_complete |= score.at.step == step
    _forget_oldest(state)


def continue_best(state: MonitorState) -> None:
    """Forget scores of versions that the lineage of a new epoch does not hold."""
    if state.best is None:
        return
    resumed = state.lineage[-1].step if state.lineage else -1
    state.best.scores = [
        score
        for score in state.best.scores
        if score.at.step <= resumed and is_in_lineage(state, score.at)
    ]


def _forget_oldest(state: MonitorState) -> None:
    """Keep the best checkpoint, however old it is, and the newest scores."""
    chosen, best = best_checkpoint(state), state.best
    assert best is not None
    # Worse ones too: a resume from an earlier step discards the best one.
    newest = best.scores[-_KEPT_SCORES:]
    best.scores = [score for score in best.scores if score is chosen or score in newest]


def _rank(best: BestScores, value: float) -> float:
    return value if best.mode == "max" else -value
