"""Tasks by name, or from a source of questions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from .base import Task, TaskError
from .objects import load_object
from .question_set import QuestionSet
from .sources import REASONING_GYM, QuestionOptions, read_questions

TASKS = {"spell-backward": "trinity_workers.tasks.spell_backward:SpellBackward"}
"""Built-in tasks."""
GROUP = "trinity_events.tasks"
"""Group of entry points under which packages offer tasks."""
_NEEDED = ("name", "fingerprint", "question", "held_out")


def load_task(
    name: str = "spell-backward",
    *,
    seed: int = 0,
    questions: str | None = None,
    prompt: str = "prompt",
    answer: str = "answer",
    options: Mapping[str, Any] | None = None,
    folder: Path = Path(),
) -> Task:
    """Return a task.

    Args:
        name: A built-in task, an entry point, `module:attribute` or `./file.py:attribute`. A class
            is called with the options, and with the seed if it takes one.
        seed: Seed of the order of the questions.
        questions: Source of the questions, instead of a named task.
        prompt: Field of a record that holds the prompt.
        answer: Field of a record that holds the right answer.
        options: Options of the task; for a source, those of :class:`QuestionOptions`.
        folder: Directory that relative names start from.

    Raises:
        TaskError: if it cannot be had; it says what is missing.
    """
    if questions is None:
        return _named(name, seed, dict(options or {}), folder)
    try:
        chosen = msgspec.convert(dict(options or {}), QuestionOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(QuestionOptions.__struct_fields__)
        raise TaskError(f"options of the task: {error}; there are {known}") from None

    def read(source: str) -> Any:
        return read_questions(source, chosen, prompt=prompt, answer=answer, folder=folder)

    evaluation = None if chosen.evaluation is None else read(chosen.evaluation)
    return QuestionSet(
        questions, read(questions), seed=seed, shuffle=chosen.shuffle, evaluation=evaluation
    )


def load_named(name: str, folder: Path = Path()) -> Any:
    """Return the object behind a task's name: a task, or a class of tasks."""
    return load_object(name, kind="task", group=GROUP, built_in=TASKS, folder=folder)


def reward_name(name: str, questions: str | None, reward: str | None) -> str:
    """Return the name of a task's reward function: the configured one, or the task's own.

    Raises TaskError if questions come from a source that has none.
    """
    if reward is not None:
        return reward
    if questions is None:
        return name
    if questions.startswith(REASONING_GYM):
        return questions
    raise TaskError(
        f"the answers to {questions} need a reward: name a function of (question, answer) in "
        "task.reward, as module:attribute or ./file.py:attribute"
    )


def _named(name: str, seed: int, options: dict[str, Any], folder: Path) -> Task:
    found = load_named(name, folder)
    if isinstance(found, type) or inspect.isfunction(found):
        found = _made(name, found, seed, options)
    elif options:
        raise TaskError(f"task {name!r} is no class, and takes no options")
    missing = [one for one in _NEEDED if not hasattr(found, one)]
    if missing:
        raise TaskError(
            f"task {name!r} has no {' and no '.join(missing)}: a task has {', '.join(_NEEDED)}"
        )
    task: Task = found
    return task


def _made(name: str, make: Any, seed: int, options: dict[str, Any]) -> Any:
    try:
        parameters = inspect.signature(make).parameters
        if "seed" in parameters:
            options = {"seed": seed, **options}
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise TaskError(f"task {name!r} does not take its options: {error}") from None
    try:
        return make(**options)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"task {name!r} cannot be made: {type(error).__name__}: {error}") from error
