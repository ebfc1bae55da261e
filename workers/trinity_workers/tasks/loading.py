"""Tasks by name, or from a source of questions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from trinity_events.errors import PackageMissing, TrinityError

from .base import Answer, Question, RewardFunction, Task
from .drawn_task import DrawnTask
from .errors import (
    FunctionUnusable,
    MixRefused,
    NoQuestions,
    NoReward,
    SetsUnusable,
    TaskError,
    TaskUnusable,
)
from .mixed_questions import MixedQuestions
from .objects import load_object, refused_arguments
from .question_set import QuestionSet
from .settings import TrainingSet
from .sources import REASONING_GYM, QuestionOptions, family_reward, read_questions

TASKS = {
    "spell-backward": "trinity_workers.tasks.spell_backward:SpellBackward",
    "sort-digits": "trinity_workers.tasks.sort_digits:SortDigits",
    "complex-sums": "trinity_workers.tasks.complex_sums:ComplexSums",
}
"""Built-in tasks, which the built-in model can be warmed up on."""
GROUP = "trinity_events.tasks"
"""Group of entry points under which packages offer tasks."""
_FILES = (".py", ".jsonl", ".ndjson", ".parquet")
_SIGNATURE = "(question, answer)"
_NEEDED = ("name", "fingerprint", "question", "held_out")


def load_task(
    name: str = "spell-backward",
    *,
    seed: int = 0,
    questions: str | None = None,
    sets: Mapping[str, TrainingSet] | None = None,
    prompt: str = "prompt",
    answer: str | None = "answer",
    options: Mapping[str, Any] | None = None,
    folder: Path = Path(),
) -> Task:
    """Return a task.

    Args:
        name: A built-in task, an entry point, `module:attribute` or `./file.py:attribute`. A class
            is called with the options, and with the seed if it takes one.
        seed: Seed of the order of the questions.
        questions: Source of the questions, instead of a named task.
        sets: Sets of questions that are mixed, instead of one source.
        prompt: Field of a record that holds the prompt, or the path to it.
        answer: Field of a record that holds the right answer, or the path to it; None if the
            questions have none.
        options: Options of the task; for a source, those of :class:`QuestionOptions`.
        folder: Directory that relative names start from.

    Raises:
        TaskError: if it cannot be had; it says what is missing.
        PackageMissing: It needs a package that is not installed.
    """
    if questions is None and not sets:
        return _load_named(name, seed, dict(options or {}), folder)
    chosen = QuestionOptions.of(options)

    def read(source: str) -> list[Question]:
        return read_questions(source, chosen, prompt=prompt, answer=answer, folder=folder)

    evaluation = None if chosen.evaluation is None else read(chosen.evaluation)
    order: Any = {"seed": seed, "shuffle": chosen.shuffle, "evaluation": evaluation}
    if questions is not None:
        return QuestionSet(questions, read(questions), **order)
    sets = sets or {}
    weights = {set_name: settings.weight for set_name, settings in sets.items()}
    questions_by_set: dict[str, list[Question]] = {}
    # All of them: a user mends the sources at once.
    errors: list[TrinityError] = []
    for set_name, settings in sets.items():
        try:
            questions_by_set[set_name] = _read_training_set(
                set_name, settings, chosen, prompt=prompt, answer=answer, folder=folder
            )
        except (TaskError, PackageMissing) as error:
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else SetsUnusable(tuple(errors))
    return MixedQuestions(questions_by_set, weights, **order)


def _read_training_set(
    name: str,
    settings: TrainingSet,
    options: QuestionOptions,
    *,
    prompt: str,
    answer: str | None,
    folder: Path,
) -> list[Question]:
    """Return the questions of a set that is mixed with others. Raises TaskError."""
    if settings.questions is None:
        raise MixRefused("source", name)
    questions = read_questions(
        settings.questions,
        # Options of the set come last: they are of its own source.
        structs.replace(options, source=options.source | settings.source),
        prompt=settings.prompt or prompt,
        answer=settings.answer or answer,
        folder=folder,
    )
    if not questions:
        raise NoQuestions(settings.questions, "set", f"task.sets.{name}")
    return questions


def load_reward(
    name: str | None,
    *,
    task: str,
    questions: str | None = None,
    sets: Mapping[str, TrainingSet] | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    folder: Path = Path(),
) -> RewardFunction:
    """Return a reward function: the named one, or that of the task or of the questions' family.

    Args:
        name: `module:attribute` or `./file.py:attribute`; None looks at task and questions.
        task: Name of the task.
        questions: Source of the questions, if they are none of the task.
        sets: Sets of questions that are mixed, instead of one source.
        seed: Seed that a class of tasks is called with.
        options: Options that a class of tasks is called with.
        folder: Directory that relative names start from.

    Raises:
        TaskError: if there is none, or it cannot be loaded.
        PackageMissing: It needs a package that is not installed.
    """
    if name is not None:
        reward = load_object(name, kind="reward", folder=folder)
    elif sets:
        name, reward = "task.sets", _load_set_rewards(sets, dict(options or {}))
    elif questions is None:
        reward = getattr(_load_named(task, seed, dict(options or {}), folder), "reward", None)
        if reward is None:
            raise TaskUnusable(task, "reward")
        name = f"{task}.reward"
    elif questions.startswith(REASONING_GYM):
        name, reward = questions, family_reward(questions, dict(options or {}))
    else:
        raise NoReward(questions)
    return _callable(name, reward)


def _load_set_rewards(
    sets: Mapping[str, TrainingSet], options: Mapping[str, Any]
) -> RewardFunction:
    """Return the reward of sets that are all families, each of which judges its own questions."""
    for name, settings in sets.items():
        if not (settings.questions or "").startswith(REASONING_GYM):
            raise NoReward(f"task.sets.{name}")
    source = QuestionOptions.of(options).source
    rewards = {
        name: family_reward(str(settings.questions), {"source": source | settings.source})
        for name, settings in sets.items()
    }

    def reward(question: Question, answer: Answer) -> Any:
        # A question names its set, which is not part of its content.
        return rewards[question.set](question, answer)

    return reward


def built_in_task(name: str, seed: int) -> DrawnTask:
    """Return a built-in task. Raises TaskError if there is none of that name."""
    task = _load_named(name, seed, {}, Path())
    assert isinstance(task, DrawnTask), "every built-in task is drawn"
    return task


def is_built_in(name: str) -> bool:
    """Return True for the name of a built-in task."""
    return name in TASKS


def absolute(name: str, folder: Path) -> str:
    """Return the name of a file, or of an object in one, from any directory; others as they are."""
    # "./file.py:attribute" and "file.jsonl" are files; "module:attribute" is none.
    place, colon, attribute = name.partition(":")
    if not place.endswith(_FILES):
        return name
    return f"{(folder / Path(place).expanduser()).resolve()}{colon}{attribute}"


def _callable(name: str, function: Any) -> RewardFunction:
    if not callable(function) or isinstance(function, type):
        raise FunctionUnusable("reward", name, "callable", _SIGNATURE)
    if (fault := refused_arguments(function, 2)) is not None:
        raise FunctionUnusable("reward", name, "arguments", _SIGNATURE, fault)
    reward: RewardFunction = function
    return reward


def _load_named(name: str, seed: int, options: dict[str, Any], folder: Path) -> Task:
    candidate = load_object(name, kind="task", group=GROUP, built_in=TASKS, folder=folder)
    if isinstance(candidate, type) or inspect.isfunction(candidate):
        candidate = _made(name, candidate, seed, options)
    elif options:
        raise TaskUnusable(name, "options")
    # By names, not isinstance: a task need not know of this project's protocol.
    missing = [attribute for attribute in _NEEDED if not hasattr(candidate, attribute)]
    if missing:
        raise TaskUnusable(name, "attributes", missing=tuple(missing), needed=_NEEDED)
    task: Task = candidate
    return task


def _made(name: str, make: Any, seed: int, options: dict[str, Any]) -> Any:
    try:
        parameters = inspect.signature(make).parameters
        # Options of the user come last: a seed among them counts.
        if "seed" in parameters:
            options = {"seed": seed, **options}
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise TaskUnusable(name, "signature", reason=str(error)) from None
    try:
        return make(**options)
    except TaskError:
        raise
    except Exception as error:
        raise TaskUnusable(name, "make", reason=f"{type(error).__name__}: {error}") from error
