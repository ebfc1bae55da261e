"""Rules of questions and rewards: one source, which can be reached, and a prompt of a judge."""

from __future__ import annotations

import string
from urllib.parse import urlsplit

from ...rules import (
    NAME,
    Computed,
    Contradictions,
    OnlyWhen,
    Requires,
    Rule,
    SettingCondition,
    Values,
    format_list,
    is_any,
    is_set,
)
from ...tasks.errors import TaskError
from ...tasks.loading import TASKS
from ...tasks.sources import DATASETS, REASONING_GYM, QuestionOptions

_PLACES = {"prompt", "reference", "response"}
_SOURCES = ("rewards.function", "rewards.service", "rewards.judge", "rewards.code_tests")
"""Settings that each choose what judges the answers."""
_JUDGE = is_set("rewards.judge")
_CODE = is_set("rewards.code_tests")
_CALLS = is_set("rewards.service") | _JUDGE
_OWN_TASK = is_any("task.name", built_in=TASKS)
_SET = f"task.sets.{NAME}"
_SOURCE = is_set("task.questions")
_SETS = is_set("task.sets")
_QUESTIONS = _SOURCE | _SETS


def _has_records(source: str | None) -> bool:
    """Return True if fields of records are named: families of reasoning-gym have their own."""
    return bool(source and not source.startswith(REASONING_GYM))


def _reads_records(values: Values) -> bool:
    sets = (*values["evaluation"].sets.values(), *values["task.sets"].values())
    sources = [values["task.questions"], *(settings.questions for settings in sets)]
    return any(map(_has_records, sources))


_RECORDS = SettingCondition(
    ("task.questions",),
    _reads_records,
    "{task.questions}, or a set of {task.sets} or {evaluation.sets}, is a source of records",
    "set {task.questions}",
)


def _find_several_sources(values: Values) -> Contradictions:
    paths = tuple(path for path in _SOURCES if values[path] is not None)
    if len(paths) > 1:
        names = format_list([f"{{{path}}}" for path in paths])
        yield paths, f"{names} each judge the answers: keep one of them"


def _find_wrong_url(values: Values) -> Contradictions:
    for path in ("rewards.service", "rewards.judge"):
        if (url := values[path]) is not None and not _is_http(url):
            yield (
                (path,),
                f"{{{path}}} is {url!r}, which is no URL of HTTP: write http://HOST:PORT/PATH",
            )


def _find_wrong_places(values: Values) -> Contradictions:
    if values["rewards.judge"] is None:
        return  # No prompt is read then, and another rule says so.
    if (fault := _wrong_place(values["rewards.judge_prompt"])) is not None:
        yield (
            ("rewards.judge_prompt",),
            f"{{rewards.judge_prompt}} {fault}: its places are {{prompt}}, {{reference}} and "
            "{response}, and any other brace is written twice",
        )


def _find_unknown_options(values: Values) -> Contradictions:
    if _QUESTIONS.is_met(values):
        try:
            QuestionOptions.of(values["task.options"])
        except TaskError as error:
            yield ("task.options",), f"{{task.options}} cannot be used: {error}"


def _find_unjudged_questions(values: Values) -> Contradictions:
    if not values["task.sets"] or any(values[path] is not None for path in _SOURCES):
        return
    # Sets with questions of their own, which no family of the training sets judges.
    sources = [
        f"evaluation.sets.{name}.questions"
        for name, settings in values["evaluation"].sets.items()
        if settings.questions is not None
    ]
    if values["task.options"].get("evaluation") is not None:
        sources.append("task.options")
    for path in sources:
        yield (
            (path, "task.sets"),
            f"{{{path}}} names questions of none of {{task.sets}}, whose families each judge their "
            "own: name a function of (question, answer) in {rewards.function}",
        )


def _find_absent_source(values: Values) -> Contradictions:
    if values[f"{_SET}.questions"] is None:
        yield (
            (f"{_SET}.questions",),
            f"{{{_SET}.questions}} is null, and the set has no questions without it: name its "
            "source",
        )


def _takes_options(values: Values) -> bool:
    return str(values[f"{_SET}.questions"]).startswith((REASONING_GYM, DATASETS))


def _is_http(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # `port` raises ValueError for what is no number of a port.
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _wrong_place(prompt: str) -> str | None:
    """Return what is wrong with the judge's prompt, in words; None if it can be filled in."""
    try:
        places = {name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None}
    except ValueError as error:
        return f"cannot be read ({error})"
    if unknown := sorted(places - _PLACES):
        return f"has the unknown place {{{unknown[0]}}}"
    if "response" not in places:
        return "has no place for the response"
    try:
        prompt.format(prompt="", reference="", response="")
    except (ValueError, LookupError) as error:  # "{prompt:d}": the places are text
        return f"cannot be filled in ({error})"
    return None


RULES: tuple[Rule, ...] = (
    OnlyWhen("task.name", ~_SOURCE, "the questions are those of {task.questions}"),
    OnlyWhen("task.name task.questions", ~_SETS, "the questions are those of {task.sets}"),
    Computed(_find_unjudged_questions),
    OnlyWhen("task.prompt task.answer", _RECORDS, "no record of a question is read"),
    OnlyWhen(
        "task.options",
        _QUESTIONS | _OWN_TASK,
        "a built-in task has none",
    ),
    Computed(_find_unknown_options),
    OnlyWhen(
        "rewards.deadline",
        is_set("rewards.function") | _QUESTIONS | _OWN_TASK | _CALLS | _CODE,
        "the reward of a built-in task is computed at once",
    ),
    OnlyWhen("task.environment_deadline", is_set("task.environment"), "there is no environment"),
    OnlyWhen(
        "rewards.error_score",
        is_any("rewards.on_error", "score"),
        "{=rewards.on_error} gives no score",
    ),
    Computed(_find_several_sources),
    Computed(_find_wrong_url),
    Requires(
        _JUDGE,
        is_set("rewards.judge_model"),
        "{rewards.judge} needs {rewards.judge_model}",
        "name its model",
    ),
    OnlyWhen(
        "rewards.judge_model rewards.judge_prompt rewards.best_grade",
        _JUDGE,
        "no judge is asked",
    ),
    Computed(_find_wrong_places),
    OnlyWhen(
        "rewards.token_variable rewards.attempts", _CALLS, "no service and no judge is called"
    ),
    OnlyWhen("rewards.calls", _CALLS | _CODE, "nothing is called, and no code is run"),
    OnlyWhen(
        "rewards.code_memory_mb rewards.code_file_mb rewards.code_files",
        _CODE,
        "no code of an answer is run",
    ),
    OnlyWhen(
        "rewards.reward_model_weight", is_set("rewards.reward_model"), "there is no reward model"
    ),
)
SET_RULES: tuple[Rule, ...] = (
    Computed(_find_absent_source),
    OnlyWhen(
        f"{_SET}.prompt {_SET}.answer",
        SettingCondition(
            (f"{_SET}.questions",),
            lambda values: _has_records(values[f"{_SET}.questions"]),
            f"{{{_SET}.questions}} is a source of records",
            f"set {{{_SET}.questions}}",
        ),
        "a family has fields of its own",
    ),
    OnlyWhen(
        f"{_SET}.source",
        SettingCondition(
            (f"{_SET}.questions",),
            _takes_options,
            f"{{{_SET}.questions}} is a data set or a family",
            f"name datasets:NAME or reasoning-gym:NAME in {{{_SET}.questions}}",
        ),
        "a file or an object takes no options",
    ),
    OnlyWhen(
        f"{_SET}.weight",
        SettingCondition(
            ("task.sets",),
            lambda values: len(values["task.sets"]) > 1,
            "{task.sets} has several sets",
            "add another set to {task.sets}",
        ),
        "the only set has all questions",
    ),
)
"""Rules of each set of questions."""
