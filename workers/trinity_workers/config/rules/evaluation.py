"""Rules of evaluations: versions that exist, and answers that differ."""

from __future__ import annotations

from ...rules import (
    NAME,
    Computed,
    Contradictions,
    OnlyWhen,
    Requires,
    Rule,
    Values,
    is_any,
    is_positive,
    is_set,
)

_SET = f"evaluation.sets.{NAME}"


def _find_too_few_samples(values: Values) -> Contradictions:
    settings = values[_SET]
    # They ascend, so that the last one needs most answers.
    if settings.passes and settings.passes[-1] > settings.samples:
        yield (
            (f"{_SET}.pass_at", f"{_SET}.samples"),
            f"{{{_SET}.pass_at}} asks for pass@{settings.passes[-1]} of {settings.samples} "
            f"answers: set {{{_SET}.samples}} {settings.passes[-1]} or more",
        )
    if settings.temperature == 0 and settings.samples > 1:
        yield (
            (f"{_SET}.temperature", f"{_SET}.samples"),
            f"{{{_SET}.temperature}} is 0, and all {settings.samples} answers to a question are "
            f"then the same: set {{{_SET}.samples}} 1, or another temperature",
        )


def _find_absent_versions(values: Values) -> Contradictions:
    settings, steps = values[_SET], values["steps"]
    if settings.versions and max(settings.versions) > steps:
        yield (
            (f"{_SET}.versions", "steps"),
            f"{{{_SET}.versions}} has step {max(settings.versions)}, and the run has {steps} "
            "{steps}: leave it out",
        )
    # Null at the start is decided by the sync method, which keeps versions or not.
    is_due = settings.at_end or settings.interval or settings.versions
    if not is_due and settings.at_start is False:
        yield (
            (f"{_SET}.at_end", f"{_SET}.at_start"),
            f"{{{_SET}}} is never asked: set {{{_SET}.at_end}} true, or give it an interval or "
            "versions",
        )


def _keeps(path: str) -> Requires:
    return Requires(
        is_set(f"{_SET}.{path}"),
        ~is_any("sync.method", "nccl"),
        f"{{{_SET}.{path}}} asks for a version while training continues, and {{sync.method}} nccl "
        "keeps none",
        "leave it out, for the last version is evaluated, or set {sync.method} memory",
    )


RULES: tuple[Rule, ...] = (
    OnlyWhen("evaluation.timeout", is_set("evaluation.sets"), "nothing is evaluated"),
)
SET_RULES: tuple[Rule, ...] = (
    Computed(_find_too_few_samples),
    OnlyWhen(
        f"{_SET}.top_p {_SET}.top_k {_SET}.min_p",
        is_positive(f"{_SET}.temperature"),
        f"{{{_SET}.temperature}} 0 takes the most likely token",
    ),
    Computed(_find_absent_versions),
    *(_keeps(path) for path in ("interval", "versions", "at_start")),
)
"""Rules of each set."""
