"""Kinds of rules between settings, of which tables are made.

1. A rule is data: checks of a configuration, the documentation and the tests read the same one.
2. A setting that has an effect only under a condition has an :class:`OnlyWhen`. Where the condition
   is not met, any other value than the default is refused.
3. Texts have settings in braces: ``{sync.method}`` is formatted as the setting's name, and
   ``{=sync.method}`` as its name and value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Struct

NAME = "NAME"
"""Stands for the name of a section that users name, in paths such as those of the sets."""
FormatField = Callable[[str], str]
"""Formats the path of a field for a sentence: as an option, a key of a file, or in Markdown."""
_PLACE = re.compile(r"\{(=?)([a-z_]+(?:\.\w+)*)\}")


class SettingConflict(NamedTuple):
    """Settings of a configuration that do not go together."""

    paths: tuple[str, ...]
    values: tuple[object, ...]
    """Values of the settings."""
    sentence: str
    """Names of the settings, the reason, and the way out."""


class Values:
    """Settings of a configuration by their paths, with their defaults and their names in texts.

    Args:
        settings: The configuration.
        defaults: The configuration that has none of its settings changed.
        named: Formats a field, given by its path.
        section: Name of the section that NAME stands for.
    """

    def __init__(
        self, settings: Struct, defaults: Struct, named: FormatField, section: str = NAME
    ) -> None:
        self.settings = settings
        self.section = section
        self.without_effect: set[str] = set()
        """Settings that were reported as such."""
        self._defaults = defaults
        self._named = named

    def __getitem__(self, path: str) -> Any:
        return self._find(path)[0]

    def is_changed(self, path: str) -> bool:
        """Return True if a setting does not have its default."""
        value, default = self._find(path)
        return bool(value != default)

    def actual(self, path: str) -> str:
        """Return a path with the section's name in the place of NAME."""
        return ".".join(self.section if key == NAME else key for key in path.split("."))

    def format(self, text: str) -> str:
        """Return a text with the names of the settings, and their values."""

        def fill(place: re.Match[str]) -> str:
            if place[2].partition(".")[0] not in self.settings.__struct_fields__:
                return place[0]  # braces of a user's own, such as those of a prompt
            name = self._named(self.actual(place[2]))
            return f"{name} {format_value(self[place[2]])}" if place[1] else name

        return _PLACE.sub(fill, text)

    def make_conflict(self, paths: Sequence[str], text: str) -> SettingConflict:
        """Return a conflict of these settings, whose text has them in braces."""
        paths = tuple(dict.fromkeys(paths))  # one setting may be both condition and requirement
        values = tuple(self[path] for path in paths)
        return SettingConflict(tuple(map(self.actual, paths)), values, self.format(text))

    def _find(self, path: str) -> tuple[Any, Any]:
        value: Any = self.settings
        default: Any = self._defaults
        for key in path.split("."):
            if isinstance(value, dict):
                value = value[self.section if key == NAME else key]
                # A section that a user names has the defaults of its type: no run begins with it.
                default = type(value)()
            else:
                value, default = getattr(value, key), getattr(default, key)
        return value, default


def format_value(value: object) -> str:
    """Return a setting's value as a file has it."""
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else msgspec.json.encode(value).decode()


@dataclass(frozen=True)
class SettingCondition:
    """Condition on settings. Its texts have settings in braces."""

    paths: tuple[str, ...]
    """Settings that it depends on."""
    is_met: Callable[[Values], bool]
    text: str
    """Clause that states the condition."""
    advice: str
    """Clause that says how to meet it."""
    opposite_advice: str = ""
    """Clause that says how not to meet it."""

    def __or__(self, other: SettingCondition) -> SettingCondition:
        return SettingCondition(
            (*self.paths, *other.paths),
            lambda values: self.is_met(values) or other.is_met(values),
            f"{self.text} or {other.text}",
            f"{self.advice}, or {other.advice}",
            f"{self.opposite_advice}, and {other.opposite_advice}",
        )

    def __and__(self, other: SettingCondition) -> SettingCondition:
        return SettingCondition(
            (*self.paths, *other.paths),
            lambda values: self.is_met(values) and other.is_met(values),
            f"{self.text} and {other.text}",
            f"{self.advice}, and {other.advice}",
            f"{self.opposite_advice}, or {other.opposite_advice}",
        )

    def __invert__(self) -> SettingCondition:
        return SettingCondition(
            self.paths,
            lambda values: not self.is_met(values),
            self.text.replace("} is ", "} is not ", 1),
            self.opposite_advice,
            self.advice,
        )


def is_any(path: str, *choices: str | bool, built_in: Collection[str] = ()) -> SettingCondition:
    """Return the condition that a setting has one of some values.

    Args:
        path: The setting, whose value is a name, true or false.
        choices: The values.
        built_in: All built-in names, if a user's own name meets the condition too.
    """
    names = [format_value(choice) for choice in choices]
    shown = format_choices([*names, "one of your own"] if built_in else names)
    other = f"choose another {{{path}}}"
    if isinstance(choices and choices[0], bool):
        other = f"set {{{path}}} {format_value(not choices[0])}"

    def is_met(values: Values) -> bool:
        value = values[path]
        return value in choices or (bool(built_in) and value not in built_in)

    return SettingCondition(
        (path,), is_met, f"{{{path}}} is {shown}", f"set {{{path}}} {shown}", other
    )


def is_positive(path: str) -> SettingCondition:
    """Return the condition that a number of a setting is above 0."""
    return SettingCondition(
        (path,),
        lambda values: values[path] > 0,
        f"{{{path}}} is above 0",
        f"set {{{path}}} above 0",
        f"set {{{path}}} 0",
    )


def is_set(path: str) -> SettingCondition:
    """Return the condition that a setting is not null or empty."""
    return SettingCondition(
        (path,),
        lambda values: bool(values[path]),
        f"{{{path}}} is set",
        f"set {{{path}}}",
        f"leave {{{path}}} out",
    )


def is_at_least(path: str, least: int) -> SettingCondition:
    """Return the condition that a number of a setting has a lower bound."""
    return SettingCondition(
        (path,),
        lambda values: values[path] >= least,
        f"{{{path}}} is {least} or more",
        f"set {{{path}}} {least} or more",
        f"set {{{path}}} below {least}",
    )


class Rule(Protocol):
    """Rule between settings."""

    def find(self, values: Values) -> Iterator[SettingConflict]:
        """Yield what contradicts it."""


@dataclass(frozen=True)
class OnlyWhen:
    """Settings that have an effect only under a condition.

    Attributes:
        settings: Paths, with spaces between them.
        condition: The condition.
        reason: Clause that says why they have none otherwise.
    """

    settings: str
    condition: SettingCondition
    reason: str

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the settings."""
        return tuple(self.settings.split())

    def find(self, values: Values) -> Iterator[SettingConflict]:
        """Yield the settings that are changed, in one sentence, if the condition is not met."""
        if self.condition.is_met(values):
            return
        paths = [path for path in self.paths if values.is_changed(path)]
        # One sentence for a setting: the first rule that finds it without effect names the cause.
        paths = [path for path in paths if values.actual(path) not in values.without_effect]
        if not paths:
            return
        values.without_effect.update(map(values.actual, paths))
        several = len(paths) > 1
        subject = format_list([f"{{{path}}}" for path in paths])
        verb = "are set" if several else f"is {format_value(values[paths[0]])}"
        yield values.make_conflict(
            (*paths, *self.condition.paths),
            f"{subject} {verb}, and {self.reason}: {self.condition.advice}, or leave "
            f"{'them' if several else 'it'} out",
        )


@dataclass(frozen=True)
class Requires:
    """Condition that needs another one.

    Attributes:
        condition: The condition.
        needed: Condition that must be met with it.
        reason: Sentence that says why.
        way_out: Clause, in the place of the conditions' own advice.
    """

    condition: SettingCondition
    needed: SettingCondition
    reason: str
    way_out: str | None = None

    def find(self, values: Values) -> Iterator[SettingConflict]:
        """Yield the settings of both conditions, if the first is met and the other is not."""
        if self.condition.is_met(values) and not self.needed.is_met(values):
            way_out = self.way_out or f"{self.needed.advice}, or {self.condition.opposite_advice}"
            paths = (*self.condition.paths, *self.needed.paths)
            yield values.make_conflict(paths, f"{self.reason}: {way_out}")


Contradictions = Iterator[tuple[Sequence[str], str]]
"""Paths of settings that contradict each other, and the text of a sentence."""


@dataclass(frozen=True)
class Computed:
    """Rule that computes."""

    function: Callable[[Values], Contradictions]

    def find(self, values: Values) -> Iterator[SettingConflict]:
        """Yield what the function finds."""
        for paths, text in self.function(values):
            yield values.make_conflict(paths, text)


def format_list(names: Sequence[str]) -> str:
    """Return names as a list in a sentence."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def format_choices(names: Sequence[str]) -> str:
    """Return names as alternatives in a sentence."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
