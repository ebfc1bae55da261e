"""Rules of evaluations: versions that exist, and answers that differ."""

from __future__ import annotations

from ...evaluation.settings import EvaluationConfig, EvaluationSet
from .base import Contradictions, FormatField


def check_evaluation(
    config: EvaluationConfig, named: FormatField, *, steps: int, keeps_versions: bool
) -> Contradictions:
    """Yield what contradicts itself: the fields' paths, and a sentence.

    Args:
        config: The section.
        named: Names a field, given by its path, in the sentences.
        steps: Training steps of the run.
        keeps_versions: False if the sync method sends versions and keeps none.
    """
    for name, settings in config.sets.items():
        yield from _check_set(f"evaluation.sets.{name}", settings, named, steps)
        if not keeps_versions and (settings.interval or settings.versions or settings.at_start):
            path = next(
                field for field in ("interval", "versions", "at_start") if getattr(settings, field)
            )
            method = named("sync.method")
            field = named(f"evaluation.sets.{name}.{path}")
            yield (
                (f"evaluation.sets.{name}.{path}", "sync.method"),
                f"{field} asks for a version while training goes on, and {method} nccl keeps none: "
                f"leave it out, for the last version is evaluated, or set {method} memory",
            )


def _check_set(
    prefix: str, settings: EvaluationSet, named: FormatField, steps: int
) -> Contradictions:
    samples = named(f"{prefix}.samples")
    if settings.passes and settings.passes[-1] > settings.samples:
        yield (
            (f"{prefix}.pass_at", f"{prefix}.samples"),
            f"{named(f'{prefix}.pass_at')} asks for pass@{settings.passes[-1]} of "
            f"{settings.samples} answers: set {samples} {settings.passes[-1]} or more",
        )
    if settings.temperature == 0 and settings.samples > 1:
        yield (
            (f"{prefix}.temperature", f"{prefix}.samples"),
            f"{named(f'{prefix}.temperature')} is 0, and all {settings.samples} answers to a "
            f"question are then the same: set {samples} 1, or another temperature",
        )
    if settings.versions and max(settings.versions) > steps:
        yield (
            (f"{prefix}.versions", "steps"),
            f"{named(f'{prefix}.versions')} has step {max(settings.versions)}, and the run has "
            f"{steps} {named('steps')}: leave it out",
        )
    if (
        not (settings.at_end or settings.interval or settings.versions)
        and settings.at_start is False
    ):
        yield (
            (f"{prefix}.at_end", f"{prefix}.at_start"),
            f"{named(prefix)} is never asked: set {named(f'{prefix}.at_end')} true, or give it an "
            "interval or versions",
        )
