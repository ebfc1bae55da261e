"""Schedule of evaluations: the published versions that a set of questions is asked of."""

from __future__ import annotations

from .settings import EvaluationSet


def is_due(
    settings: EvaluationSet,
    step: int,
    *,
    before: int | None,
    steps: int,
    keeps_versions: bool = True,
) -> bool:
    """Return True if the version of a step is to be evaluated on a set.

    Versions need not be of every step. The first version at or after a chosen step, or after a
    multiple of the interval, is evaluated.

    Args:
        settings: Settings of the set.
        step: Step of the version that is published.
        before: Step of the last version that needs no evaluation any more; None if there is none.
        steps: Training steps of the run.
        keeps_versions: False if the sync method sends versions and keeps none.
    """
    if step == before:
        return False
    if step == steps:
        return settings.at_end or _is_passed(settings, step, before)
    if step == 0:
        at_start = keeps_versions if settings.at_start is None else settings.at_start
        return at_start or 0 in settings.versions
    return _is_passed(settings, step, before)


def _is_passed(settings: EvaluationSet, step: int, before: int | None) -> bool:
    """Return True if a chosen step, or a multiple of the interval, lies behind ``before``."""
    after = 0 if before is None else before
    # A multiple may lie between two versions: the next version stands for it.
    by_interval = settings.interval > 0 and step // settings.interval > after // settings.interval
    return by_interval or any(after < chosen <= step for chosen in settings.versions)
