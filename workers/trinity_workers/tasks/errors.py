"""Errors of tasks, questions, and the objects that a user names."""

from __future__ import annotations

from typing import ClassVar, Literal

from trinity_events.errors import TrinityError

_NAME_REWARD = (
    "name a function of (question, answer) in rewards.function, as module:attribute or "
    "./file.py:attribute"
)
"""Way out where no function judges the answers."""


class TaskError(TrinityError):
    """A task, its questions, or one of its functions cannot be used."""


class SetsUnusable(TaskError):
    """The questions of several sets cannot be read.

    Attributes:
        errors: Error of each of them.
    """

    errors: tuple[TrinityError, ...]
    text = "{_listed}"

    @property
    def _listed(self) -> str:
        return "; ".join(map(str, self.errors))


class ObjectUnusable(TaskError):
    """There is no object of a name that a user gave, or its module cannot be imported.

    Attributes:
        kind: Kind of object.
        name: The name.
        fault: ``unknown`` for a name without a colon, ``form`` for one that lacks a half,
            ``attribute``, ``file`` or ``module`` for what is absent, ``import`` if the module
            raises, ``load`` if the entry point does.
        place: File or module.
        choices: Names that are known.
        nearest: Most similar name, if one is similar.
        reason: Error of the import.
    """

    kind: str
    name: str
    fault: Literal["unknown", "form", "attribute", "file", "module", "import", "load"]
    place: str = ""
    choices: tuple[str, ...] = ()
    nearest: str | None = None
    reason: str = ""
    texts: ClassVar = {
        "unknown": "unknown {kind} {name!r}: {_nearest}{_choices}name your own as module:attribute "
        "or ./file.py:attribute",
        "form": "{kind} {name!r} is neither module:attribute nor ./file.py:attribute",
        "attribute": "{place} has no {_attribute!r}{_nearest_attribute}",
        "file": "there is no file {place} with the {kind}",
        "module": "there is no module {place}: install it, or name its file as ./file.py:attribute",
        "import": "{_module} cannot be imported: {reason}",
        "load": "{kind} {name!r} cannot be loaded: {reason}",
    }

    @property
    def _nearest(self) -> str:
        return "" if self.nearest is None else f"did you mean {self.nearest!r}? "

    @property
    def _nearest_attribute(self) -> str:
        return "" if self.nearest is None else f": did you mean {self.nearest!r}?"

    @property
    def _choices(self) -> str:
        return f"choose one of {', '.join(self.choices)}, or " if self.choices else ""

    @property
    def _attribute(self) -> str:
        return self.name.partition(":")[2]

    @property
    def _module(self) -> str:
        return self.place if self.place.endswith(".py") else f"module {self.place}"


class FunctionUnusable(TaskError):
    """An object that a user named cannot be called as the run calls it.

    Attributes:
        kind: Kind of function.
        name: Its name.
        fault: ``callable``, ``method`` for an object without it, or ``arguments``.
        signature: Arguments of the call.
        reason: Why the function does not take them.
    """

    kind: str
    name: str
    fault: Literal["callable", "method", "arguments"]
    signature: str
    reason: str = ""
    texts: ClassVar = {
        "callable": "{kind} {name!r} is no function of {signature}",
        "method": "{kind} {name!r} is no function of {signature}, and has no method 'reply'",
        "arguments": "{kind} {name!r} is called with {signature}, and takes others: {reason}",
    }


class TaskUnusable(TaskError):
    """A task lacks something, or cannot be made.

    Attributes:
        task: Its name.
        fault: ``reward`` if it has none, ``options`` if it takes none, ``attributes`` if it lacks
            some, ``signature`` if it does not take its options, ``make`` if it raises.
        missing: Attributes that it lacks.
        needed: Attributes that a task has.
        reason: Error of the task.
    """

    task: str
    fault: Literal["reward", "options", "attributes", "signature", "make"]
    missing: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    reason: str = ""
    texts: ClassVar = {
        "reward": "task {task!r} has no reward: " + _NAME_REWARD,
        "options": "task {task!r} is no class, and takes no options",
        "attributes": "task {task!r} has no {_missing}: a task has {_needed}",
        "signature": "task {task!r} does not take its options: {reason}",
        "make": "task {task!r} cannot be made: {reason}",
    }

    @property
    def _missing(self) -> str:
        return " and no ".join(self.missing)

    @property
    def _needed(self) -> str:
        return ", ".join(self.needed)


class NoReward(TaskError):
    """Questions of a source are answered, and no function judges the answers.

    Attributes:
        source: The source, or the setting of a set.
    """

    source: str
    text = "the answers to {source} need a reward: " + _NAME_REWARD


class TaskOptionsRefused(TaskError):
    """A task has an option that is unknown or wrong.

    Attributes:
        reason: The option, and what is wrong with it.
        allowed: Options that there are.
    """

    reason: str
    allowed: tuple[str, ...]
    text = "options of the task: {reason}; there are {_allowed}"

    @property
    def _allowed(self) -> str:
        return ", ".join(self.allowed)


class NoQuestions(TaskError):
    """A source has no question to train or to measure on.

    Attributes:
        source: The source.
        fault: ``training``, ``held out`` if it has questions to measure on alone, ``set`` for one
            of the sets.
        setting: Setting of the set.
    """

    source: str
    fault: Literal["training", "held out", "set"]
    setting: str = ""
    texts: ClassVar = {
        "training": "{source} has no question to train on: add questions",
        "held out": "{source} has no question to train on: all of its questions are held out: add "
        "questions",
        "set": "{setting}: {source} has no question: add questions",
    }


class TooFewQuestions(TaskError):
    """A task has fewer distinct questions than are asked for.

    Attributes:
        task: Its name.
        split: Part of its questions.
        available: About how many it has.
        requested: Questions that are asked for.
    """

    task: str
    split: str
    available: int
    requested: int
    text = (
        "task {task!r} has only about {available} distinct {split} questions, and {requested} were "
        "asked for: ask for fewer"
    )


class QuestionUnencodable(TaskError):
    """A question of a task holds what JSON cannot.

    Attributes:
        task: Name of the task.
        reason: Error of the encoder.
    """

    task: str
    reason: str
    text = "a question of {task} holds no JSON: {reason}"


class SourceUnreadable(TaskError):
    """A source of questions cannot be read.

    Attributes:
        source: Its name, or the path of its file.
        fault: What is wrong with it.
        line: Line of the file.
        reason: Error of the library that reads it, or the byte that is no UTF-8.
    """

    source: str
    fault: Literal[
        "form",
        "UTF-16",
        "encoding",
        "JSON",
        "Parquet",
        "text",
        "absent",
        "file",
        "load",
        "family",
        "object",
    ]
    line: int | None = None
    reason: str = ""
    texts: ClassVar = {
        "form": "{source!r} is no source of questions: give a file (.jsonl or .parquet), "
        "datasets:NAME, reasoning-gym:NAME, module:attribute or ./file.py:attribute",
        "UTF-16": "{source} is UTF-16, and is read as UTF-8: convert it by iconv -t UTF-8 -f "
        "UTF-16",
        "encoding": "line {line} of {source} is not UTF-8 (byte {reason}): convert it by iconv -t "
        "UTF-8 -f LATIN1",
        "JSON": "line {line} of {source} is no JSON: {reason}",
        "Parquet": "{source} is no Parquet file: {reason}",
        "text": "{source} has text that is not UTF-8: {reason}",
        "absent": "there is no file of questions at {source}",
        "file": "{source} cannot be read: {reason}",
        "load": "{source} cannot be loaded: {reason}",
        "family": "{source} cannot be made: {reason}",
        "object": "{source} gives no questions: {reason}",
    }


class AnswersMissing(TaskError):
    """No record of a source has an answer.

    Attributes:
        source: The source.
        field: Field in which answers are looked for.
        reason: Fields that there are, or that it is null.
    """

    source: str
    field: str
    reason: str
    text = (
        "no record of {source} has an answer in its field {field!r}: {reason}: name another in "
        "task.answer, or set that to null if the reward needs none"
    )


class RecordRefused(TaskError):
    """A record of a source is no question.

    Attributes:
        source: The source.
        record: Number of the record, from 1.
        fault: ``kind`` if it is no mapping, ``field`` if it has no prompt, ``number`` for an answer
            that JSON has not, ``prompt`` for one of another type, ``JSON`` for what it cannot hold,
            ``empty`` for a prompt or message without content, ``parts`` for messages of more than
            text.
        reason: Type, value or error that is the fault; for ``field``, the fields that there are.
        field: Field of the prompt.
    """

    source: str
    record: int
    fault: Literal["kind", "field", "number", "prompt", "JSON", "empty", "parts"]
    reason: str = ""
    field: str = ""
    texts: ClassVar = {
        "kind": "record {record} of {source} is {reason}, not a mapping of fields to values",
        "field": "record {record} of {source} has no field {field!r} for the prompt: {reason}",
        "number": "record {record} of {source} has the answer {reason}, and JSON has no such "
        "number",
        "prompt": "record {record} of {source}: the prompt is neither text nor chat messages "
        "({reason})",
        "JSON": "record {record} of {source} holds what JSON cannot: {reason}",
        "empty": "record {record} of {source} has an empty prompt, or a message without a role",
        "parts": "record {record} of {source} has a message with {reason}, and the policies here "
        "read text alone: leave such questions out, or write text in the place of these parts",
    }


class MixRefused(TaskError):
    """Sets of questions cannot be mixed.

    Attributes:
        fault: ``none`` without a set, ``weight`` for one that is not above 0, ``source`` without
            one, ``fields`` if two sets differ in theirs.
        name: Name of the set; of the one that has the fields.
        weight: Its weight.
        other: Name of the set that lacks the fields.
        missing: The fields.
    """

    fault: Literal["none", "weight", "source", "fields"]
    name: str = ""
    weight: float = 0.0
    other: str = ""
    missing: tuple[str, ...] = ()
    texts: ClassVar = {
        "none": "there is no set of questions to mix: name one in task.sets",
        "weight": "task.sets.{name}.weight is {weight:g}, and a weight is a number above 0: leave "
        "out a set that is not to be asked",
        "source": "task.sets.{name} has no source: set task.sets.{name}.questions",
        "fields": "questions of task.sets.{name} have {_missing}, and no question of "
        "task.sets.{other} has: one reward and one template read both, so give the records of both "
        "sets the same fields",
    }

    @property
    def _missing(self) -> str:
        return ", ".join(self.missing)
