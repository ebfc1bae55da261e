"""Reader of configuration files, which finds every mistake and says each in one sentence."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from trinity_events.system.error_text import shorten
from trinity_events.system.open_folder import OpenFolder

from ..algorithms.errors import UnknownPreset
from ..algorithms.presets import merged, preset_values
from ..evaluation.settings import NAME as SECTION_NAME
from ..tasks import absolute
from .errors import (
    BadSettings,
    BaseRefused,
    CommandRefused,
    ConfigUnreadable,
    NoSection,
    PresetRefused,
    SettingsContradict,
    SeveralMistakes,
    UnknownSetting,
    WrongValue,
)
from .fields import collections, fields, general_path, sections
from .other_names import (
    SettingNamedTwice,
    format_absent_value,
    format_alias,
    format_hint,
    is_section,
    to_current_value,
    to_path,
)
from .rules.table import find_contradictions
from .train_config import TrainConfig

logger = logging.getLogger(__name__)

COPY = "config.yaml"
"""Name of the effective configuration in a run's folder."""
# PyYAML follows YAML 1.1, in which 5e-4 is a text: a float needs a dot, and its exponent a sign
# (yaml/resolver.py).
_FLOAT = re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$")
# Always paths, also without a slash.
_PATHS = (
    *("model.path", "algorithm.teacher.path", "rewards.reward_model"),
    *("checkpoints.root", "tracking.folder"),
)
# Paths only if they look like one: others name modules, entry points or data sets.
_SOURCES = (
    *("task.name", "task.questions", "task.sets.NAME.questions"),
    *("rewards.function", "task.environment"),
    *("explorer.engine", "algorithm.advantage", "algorithm.loss", "record.redact"),
    "evaluation.sets.NAME.questions",
)
_SIMILAR = 0.75
"""Least likeness of a setting that is proposed: at 0.6, `lr` was taken for `trainer`."""
_LONGEST_SHOWN = 60
"""Characters of a value in a message."""
BASE = "base"
"""Name by which a file gives the path of a configuration that it is laid over."""


class SettingOverride(Struct, frozen=True):
    """Value that is laid over the file's."""

    path: str
    value: Any
    origin: str
    """Part of the command line that has it, for messages."""
    text: str | None = None
    """The value as it was typed, where its type is still to be found out."""


class Reading(Struct):
    """Configuration as far as it can be read, and every mistake in it."""

    config: TrainConfig = field(default_factory=TrainConfig)
    problems: list[BadSettings] = field(default_factory=list)

    def checked(self) -> TrainConfig:
        """Return the configuration. Raises BadSettings with the first mistake."""
        if len(self.problems) > 1:
            raise SeveralMistakes(tuple(self.problems), "first")
        if self.problems:
            raise self.problems[0]
        return self.config


def read_config(
    path: Path,
    settings: Iterable[SettingOverride] = (),
    *,
    named: Callable[[str], str] | None = None,
) -> Reading:
    """Read a configuration file, laid over the one that it names as `base`, if it names one.

    Args:
        path: The file, YAML or TOML.
        settings: Values that are laid over it.
        named: Names fields in messages; by default they are named by file and path.

    Raises:
        BadSettings: If the file or its base cannot be read at all.
    """
    reading = _Reader(path)
    # The base first, over which the file is laid.
    for file, content in reversed(_with_bases(path)):
        reading.read(file, content)
    reading.overlay(settings)
    return reading.finished(named or (lambda name: name), "" if named else str(path))


def typed_setting(text: str) -> SettingOverride:
    """Parse ``section.field=value`` from the command line. Raises BadSettings."""
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise CommandRefused("setting", text)
    return SettingOverride(path, _scalar(value), f"--set {text}", value)


def to_yaml(config: TrainConfig) -> str:
    """Return the configuration as YAML, every field with its value."""
    import yaml

    values = msgspec.json.decode(config.to_text())
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def write_copy(folder: Path, config: TrainConfig) -> None:
    """Write the configuration into a run's folder, atomically."""
    with OpenFolder.open_run(folder, create=True) as run:
        run.write(COPY, to_yaml(config).encode())


class _Reader:
    def __init__(self, path: Path) -> None:
        self._file = path
        self._values: dict[str, Any] = {}
        self._problems: list[BadSettings] = []
        self._wrong: set[str] = set()
        self._names: dict[str, str] = {}
        """Names by which the file, or the command line, gives the settings, by path."""

    def read(self, file: Path, content: Any) -> None:
        """Take the values of a file, over those of the files before."""
        self._file, self._names = file, {}
        if content is None:
            return
        if not isinstance(content, Mapping):
            self._problems.append(NoSection(str(file), "file", _format(content)))
            return
        self._read_section("", content)

    def _read_section(self, prefix: str, content: Mapping[Any, Any]) -> None:
        for name, value in content.items():
            path = f"{prefix}{name}"
            # Before the fields: the names below are the user's.
            if path in collections() and isinstance(value, Mapping):
                self._read_named_sections(path, value, str(self._file), self._file.parent)
            elif general_path(path) not in (*sections(), *collections()):
                self._take(path, value, str(self._file), self._file.parent)
            elif isinstance(value, Mapping):
                self._read_section(f"{path}.", value)
            elif value is not None:
                self._problems.append(NoSection(str(self._file), "section", _format(value), path))

    def _read_named_sections(
        self, path: str, content: Mapping[Any, Any], origin: str, base: Path
    ) -> None:
        """Take sections that the user names, in the place of all that were there."""
        self._values = {
            key: value for key, value in self._values.items() if not key.startswith(f"{path}.")
        }
        # Also where the file has none: an empty mapping takes away those of the base.
        self._values[path] = {}
        for name, section in content.items():
            if not SECTION_NAME.fullmatch(str(name)):
                self._problems.append(NoSection(origin, "name", _format(name), path))
            elif section is not None and not isinstance(section, Mapping):
                self._problems.append(
                    NoSection(origin, "section", _format(section), f"{path}.{name}")
                )
            else:
                self._values[f"{path}.{name}"] = {}
                for field_name, value in (section or {}).items():
                    self._take(f"{path}.{name}.{field_name}", value, origin, base)

    def overlay(self, settings: Iterable[SettingOverride]) -> None:
        """Take the values of the command line."""
        self._names = {}  # they may replace a value that the file gives by a former name
        for setting in settings:
            self._overlay(setting)

    def _overlay(self, setting: SettingOverride) -> None:
        value, path = setting.value, to_path(setting.path)
        if setting.path in collections() and isinstance(value, Mapping):
            self._read_named_sections(setting.path, value, setting.origin, Path.cwd())
            return
        field = fields().get(general_path(path))
        if setting.text is not None and field is not None:
            try:
                field.converted(value)
            except ValueError:
                # A text that looks like a number, such as the name of a run.
                value = setting.text if _fits(path, setting.text) else value
        self._take(setting.path, value, setting.origin, Path.cwd())

    def _take(self, name: str, value: Any, origin: str, base: Path) -> None:
        path = to_path(name)
        field = fields().get(general_path(path))
        if field is None:
            if isinstance(value, Mapping) and is_section(name):
                # Each field of another project's section has its own sentence.
                for field_name, inner in value.items():
                    self._take(f"{name}.{field_name}", inner, origin, base)
            else:
                self._problems.append(_make_unknown(origin, name))
            return
        if alias := format_alias(name):
            logger.warning("%s: %s", origin, alias)
        # Of one file or command line: each may use another name than the one below it.
        earlier = self._names.setdefault(path, name)
        if earlier != name:
            self._problems.append(SettingNamedTwice(path, (earlier, name), origin))
            return
        value = to_current_value(path, value)
        try:
            self._values[path] = _resolved(path, field.converted(value), base)
        except ValueError:  # msgspec's error is one
            self._wrong.add(path)
            reason = format_absent_value(path, value)
            self._problems.append(WrongValue(origin, name, _format(value), field.allowed, reason))

    def finished(self, named: Callable[[str], str], origin: str) -> Reading:
        """Return the configuration, after the checks that concern several fields."""
        config = msgspec.convert(self._over_preset(_nested(self._values), origin), TrainConfig)
        for conflict in find_contradictions(config, named):
            # A wrong value has left the default, which the rule would judge in its place.
            if not self._wrong.intersection(conflict.paths):
                self._problems.append(SettingsContradict(*conflict, origin))
        return Reading(config, self._problems)

    def _over_preset(self, values: dict[str, Any], origin: str) -> dict[str, Any]:
        """Return the values laid over those of the preset that they name."""
        algorithm = values.get("algorithm", {})
        if (preset := algorithm.get("preset")) is None:
            return values
        try:
            return values | {"algorithm": merged(preset_values(preset), algorithm)}
        except UnknownPreset as error:
            self._problems.append(PresetRefused(origin, error))
            return values


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by path as sections in one another."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *names, last = path.split(".")
        section = tree
        for name in names:
            section = section.setdefault(name, {})
        section[last] = dict(value) if isinstance(value, dict) else value
    return tree


def _with_bases(path: Path) -> list[tuple[Path, Any]]:
    """Return the contents of a file, of its base, of that one's base, and so on.

    Raises BaseRefused for a base that is no path, or that is among the files before it.
    """
    files: list[tuple[Path, Any]] = []
    while True:
        content = _decoded(path)
        if not isinstance(content, Mapping) or BASE not in content:
            return [*files, (path, content)]
        base = content[BASE]
        files.append((path, {name: value for name, value in content.items() if name != BASE}))
        if not isinstance(base, str) or not base:
            raise BaseRefused(path, "path", _format(base))
        following = Path(os.path.normpath(path.parent / Path(base).expanduser()))
        if any(following.absolute() == file.absolute() for file, _ in files):
            raise BaseRefused(path, "circle", str(following), tuple(file for file, _ in files))
        path = following


def _decoded(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigUnreadable(str(path), "file", error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise ConfigUnreadable(str(path), "file", "it is not text in UTF-8") from None
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigUnreadable(str(path), "TOML", str(error)) from None
    if path.suffix not in {".yaml", ".yml"}:
        raise ConfigUnreadable(str(path), "ending")
    if importlib.util.find_spec("yaml") is None:
        raise ConfigUnreadable(str(path), "pyyaml")
    return _yaml(text, str(path))


def _yaml(text: str, origin: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Loader that refuses a name that is given twice, and reads 5e-4 as a number."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            # PyYAML takes the last one silently.
            names = [key.value for key, _ in node.value]
            for name in names:
                if names.count(name) > 1:
                    line = node.start_mark.line + 1
                    raise ConfigUnreadable(origin, "twice", line=line, name=name)
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)  # noqa: S506 - it is a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else None
        reason = getattr(error, "problem", None) or "it cannot be parsed"
        raise ConfigUnreadable(origin, "YAML", reason, line) from None
    except ValueError as error:  # a date that is none
        raise ConfigUnreadable(origin, "YAML", str(error)) from None


def _scalar(text: str) -> Any:
    try:
        # Typed as in a file, so that --set and a line of YAML mean the same.
        return _yaml(text, f"--set: {text!r}")
    except ConfigUnreadable:
        return text  # such as an open bracket, which is no YAML and may be the value


def _fits(path: str, value: Any) -> bool:
    try:
        fields()[general_path(path)].converted(value)
    except ValueError:
        return False
    return True


def _resolved(path: str, value: Any, base: Path) -> Any:
    """Return the value with its path, if it holds one, made absolute."""
    # The one option that names a source, wherever the task looks for it.
    if path == "task.options" and isinstance(value.get("evaluation"), str):
        return value | {"evaluation": absolute(value["evaluation"], base)}
    if not isinstance(value, str):
        return value
    path = general_path(path)
    if path in _PATHS:
        return str((base / Path(value).expanduser()).resolve())
    return absolute(value, base) if path in _SOURCES else value


def _make_unknown(origin: str, name: str) -> UnknownSetting:
    if (hint := format_hint(name)) is not None:
        return UnknownSetting(origin, name, hint=hint)
    if (nearest := _find_nearest(name)) is not None:
        return UnknownSetting(origin, name, nearest)
    names = tuple(section for section in sections() if "." not in section)
    return UnknownSetting(origin, name, sections=names)


def _find_nearest(path: str) -> str | None:
    """Return the setting that may have been meant."""
    paths = [*fields(), *sections()]
    close = difflib.get_close_matches(path, paths, 1, cutoff=_SIMILAR)
    if not close:  # the section may be left out, or be the wrong one
        last = path.rpartition(".")[2]
        # Reversed: of fields with one last name the first stays.
        names = {candidate.rpartition(".")[2]: candidate for candidate in reversed(paths)}
        close = [
            names[match] for match in difflib.get_close_matches(last, names, 1, cutoff=_SIMILAR)
        ]
    return close[0] if close else None


def _format(value: Any) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        text = repr(value)
    return shorten(text, _LONGEST_SHOWN)
